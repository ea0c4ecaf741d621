"""The search for the longest row of a contender: its steps, its limits, and its attention."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from row_searches import LORA, SEARCH, SIZES, TINY
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import attention_blocks, lora_contenders, row_search
from benchmarks.guided_search import candidates, expected_longest, width
from benchmarks.longest_row import summary
from benchmarks.lora_contenders import OFFLOADED
from benchmarks.measure import Failure
from benchmarks.row_estimate import estimated_longest
from benchmarks.row_search import Search, rows
from benchmarks.sft_step import tiny_tokenizer
from liger_patch.patch.forward import record_of
from liger_patch.patch.offload import CheckpointOffload

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning"
)


@pytest.fixture
def search_of(tmp_path: Path) -> Callable[..., Search]:
    """Save the tiny model, and return what asks for it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(TINY.config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return lambda contender: replace(SEARCH, contender=contender, folder=str(tmp_path))


@pytest.mark.parametrize(
    ("known", "longest"), [(known, n) for known in (0, 16) for n in range(known, 137, 8)]
)
@pytest.mark.parametrize("wrong", [None, 0.25, 0.9, 1.0, 1.1, 4.0])
def test_the_search_finds_the_longest_row(longest: int, known: int, wrong: float | None):
    """Whatever is expected."""
    tried: dict[int, bool] = {}

    def fits(tokens: int) -> bool:
        assert tokens not in tried
        assert tokens % 8 == 0 < tokens <= 104
        tried[tokens] = tokens <= longest
        return tried[tokens]

    def expected() -> int | None:
        return None if wrong is None else int(wrong * longest)

    assert list(candidates(fits, known, 104, 8, expected)) == list(tried)
    assert max([known, *(n for n, fit in tried.items() if fit)]) == min(longest, 104)
    assert len(tried) <= 9


@pytest.mark.parametrize("longest", [8192 * n for n in (6, 15, 50, 100, 124)])
@pytest.mark.parametrize(("wrong", "most"), [(0.99, 4), (1.0, 2), (1.01, 3), (1.02, 3)])
def test_a_limit_costs_a_few_steps(longest: int, wrong: float, most: int):
    tried: dict[int, bool] = {}

    def fits(tokens: int) -> bool:
        tried[tokens] = tokens <= longest
        return tried[tokens]

    for _ in candidates(fits, 8192, 2**20, 8192, lambda: int(wrong * longest) + 1):
        pass
    fitting = max((n for n, fit in tried.items() if fit), default=8192)
    assert longest - width(longest, 8192) < fitting <= longest
    assert len(tried) <= most


def test_a_line_through_two_peaks_meets_the_limit():
    peaks = {100: 30.0, 200: 50.0, 400: 80.0}
    assert expected_longest({}, 70.0) is None
    assert expected_longest({100: 30.0}, 70.0) is None
    assert expected_longest({100: 30.0, 200: 30.0}, 70.0) is None
    assert expected_longest(peaks, 20.0) == 50  # the shortest
    assert expected_longest(peaks, 40.0) == 150
    assert expected_longest(peaks, 65.0) == 300
    assert expected_longest(peaks, 95.0) == 500  # the longest
    assert [width(n, 8192) for n in (8192, 700_000, 2**20)] == [8192, 8192, 16384]


@pytest.mark.parametrize("contender", ["eager", "liger_patch"])
def test_a_contender_searches_up_to_the_most(search_of: Callable[..., Search], contender: str):
    """On the CPU every row fits."""
    found = list(rows(search_of(contender)))
    assert found[0]["timed"] == 16
    assert found[0]["ms"] > 0
    steps = found[1:]
    assert [row["tokens"] for row in steps if row["gib"] == 1.0] == [8, 16, 32, 64, 96]
    assert not [row for row in steps if row["gib"] == 2.0]  # known
    _, small, large = summary(search_of(contender), found, "does not run: exit status 0: ", 8)
    assert (small["tokens"], large["tokens"]) == (96, 96)
    assert small["at_least"]
    assert large["at_least"]
    assert not any("failure" in row for row in steps)


def test_a_row_that_does_not_fit_is_followed_by_shorter_ones(
    search_of: Callable[..., Search], monkeypatch: pytest.MonkeyPatch
):
    allowed = {1.0: 40, 2.0: 64}
    limit: list[float | None] = [None]
    step = row_search.run_step

    def run_step(loss: object, model: torch.nn.Module, batch: dict) -> None:
        if limit[0] is not None and batch["labels"].numel() > allowed[limit[0]]:
            raise torch.OutOfMemoryError
        step(loss, model, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(row_search, "run_step", run_step)
    monkeypatch.setattr(row_search, "limit_memory", lambda gib, _: limit.__setitem__(0, gib))
    search = search_of("liger_patch")
    found = list(rows(search))
    fit, failed = None, "out of memory"
    assert [(row["tokens"], row.get("failure")) for row in found if row.get("gib") == 1.0] == [
        (8, fit),
        (16, fit),
        (32, fit),
        (64, failed),
        (48, failed),
        (40, fit),
    ]
    _, small, large = summary(search, found, "", 8)
    assert (small["tokens"], large["tokens"]) == (40, 64)
    assert not {"at_least", "failure", "ends_with"} & {*small, *large}
    named = {"gib": 1.0, "tokens": 48, "failure": "does not run: RuntimeError: host memory"}
    steps = [row for row in found if row.get("tokens") != 48]
    (_, stopped, _) = summary(search, [*steps, named], "", 8)
    assert (stopped["tokens"], stopped["ends_with"]) == (40, named["failure"])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a step take 10 MiB a token and 200, of which gaps are 10; return the steps' tokens.

    All memory is 3 GiB.
    """
    room, steps = [3 * 1024.0], []

    def limit_memory(gib: float | None, _: str) -> float:
        room[0] = 1024 * min(3.0, gib or 3.0)
        return room[0]

    def run_step(loss: object, model: object, batch: dict) -> None:
        steps.append(batch["labels"].numel())
        if 200 + 10 * steps[-1] > room[0]:
            raise torch.OutOfMemoryError

    def peaks(_: str) -> dict[str, float]:
        mib = 190.0 + 10 * steps[-1]
        return {"peak_mib": mib, "reserved_mib": mib + 20}

    monkeypatch.setattr(row_search, "limit_memory", limit_memory)
    monkeypatch.setattr(row_search, "run_step", run_step)
    monkeypatch.setattr(row_search, "peaks", peaks)
    return steps


def test_timed_rows_tell_where_a_search_begins(search_of: Callable[..., Search], gpu: list[int]):
    search = replace(search_of("eager"), timed=(16, 64), limits=(1.0, 2.0, 3.0), most=400)
    found = list(rows(search))
    timed, limited = found[:2], [row for row in found if "gib" in row]
    assert [row["peak_mib"] for row in timed] == [350.0, 830.0]
    assert gpu[:4] == [16, 16, 64, 64]
    # 64 tokens reserve 850 MiB; expected at the limits are 83, 185 and 288
    assert [(row["gib"], row["tokens"], row.get("failure")) for row in limited] == [
        (1.0, 80, None),
        (1.0, 88, "out of memory"),
        (2.0, 184, None),
        (2.0, 192, "out of memory"),
        (3.0, 288, "out of memory"),
        (3.0, 280, None),
    ]
    assert gpu[4:] == [80, 88, 184, 192, 288, 280]
    lines = list(summary(search, found, "", 8))[2:]
    assert [row["tokens"] for row in lines] == [80, 184, 280]
    assert not any(row.get("at_least") for row in lines)


def test_an_estimate_tells_where_a_search_begins(search_of: Callable[..., Search], gpu: list[int]):
    """Two steps a limit, without a timed row, also where the estimate is a little too long."""
    guesses = ((1.0, 83), (2.0, 192), (3.0, 288))
    search = replace(search_of("eager"), timed=(), limits=(1.0, 2.0, 3.0), most=400)
    search = replace(search, guesses=guesses)
    found = list(rows(search))
    assert gpu == [80, 88, 192, 184, 288, 280]
    lines = list(summary(search, found, "", 8))
    assert [row["tokens"] for row in lines] == [80, 184, 280]
    assert not any(row.get("at_least") for row in lines)


@pytest.mark.slow
def test_estimates_are_those_of_the_contenders_step():
    """Ours take the host memory that they may; Unsloth is not estimated."""
    config = AutoConfig.for_model("llama", **SIZES | {"num_hidden_layers": 8})

    def longest(contender: str, host_gib: float | None = None, every: int = 1) -> int:
        (tokens,) = estimated_longest(config, contender, LORA, [0.5], host_gib, every).values()
        return tokens

    eager, ours, offloaded = map(longest, ("eager", "liger_patch", OFFLOADED))
    assert eager < ours < longest(OFFLOADED, 0.1) < longest(OFFLOADED, 0.1, 4) < offloaded
    assert longest("liger_patch", 0.1, 4) == ours
    assert estimated_longest(config, "Unsloth", LORA, [2.0], None, 1) == {}


def test_rows_beyond_one_that_does_not_fit_are_not_tried(
    search_of: Callable[..., Search], gpu: list[int]
):
    search = replace(search_of("eager"), timed=(16, 400, 500), limits=(1.0, 3.0), most=600)
    found = list(rows(search))
    assert [row.get("failure") for row in found[:3]] == [None, *["out of memory"] * 2]
    assert 500 not in gpu
    lines = list(summary(search, found, "", 8))
    assert [row.get("tokens") for row in lines[3:]] == [80, 280]
    assert not any(row.get("at_least") for row in lines)


def test_the_host_has_no_memory_for_longer_rows(
    search_of: Callable[..., Search], gpu: list[int], monkeypatch: pytest.MonkeyPatch
):
    bytes_of_token = 2 * SIZES["hidden_size"] * SIZES["num_hidden_layers"]
    monkeypatch.setitem(lora_contenders.CONTENDERS, "Unsloth", lora_contenders.CONTENDERS["eager"])
    search = replace(search_of("Unsloth"), timed=(16, 64, 184), limits=(1.0, 3.0))
    search = replace(search, most=400, host_gib=131 * bytes_of_token / 2**30)
    found = list(rows(search))
    assert max(gpu) <= 128
    reason = found[2]["failure"]
    assert "host memory" in reason
    lines = list(summary(search, found, "", 8))[3:]
    assert [(row["tokens"], row.get("ends_with")) for row in lines] == [(80, None), (128, reason)]
    gpu.clear()
    found = list(rows(replace(search, contender="eager")))  # keeps them on the GPU
    assert found[2]["ms"] > 0


def test_our_checkpoints_beyond_the_hosts_memory_stay_on_the_gpu(
    search_of: Callable[..., Search], gpu: list[int], monkeypatch: pytest.MonkeyPatch
):
    models = []
    ours = lora_contenders.CONTENDERS[OFFLOADED]

    def noting(*asked):
        models.append(ours(*asked))
        return models[-1]

    monkeypatch.setitem(lora_contenders.CONTENDERS, OFFLOADED, noting)
    bytes_of_token = 2 * SIZES["hidden_size"] * SIZES["num_hidden_layers"]
    host_gib = 131 * bytes_of_token / 2**30
    search = replace(search_of(OFFLOADED), timed=(16, 184), limits=(1.0, 3.0), most=400)
    found = list(rows(replace(search, host_gib=host_gib)))
    assert found[1]["ms"] > 0
    lines = list(summary(search, found, "", 8))[2:]
    assert [(row["tokens"], row.get("ends_with")) for row in lines] == [(80, None), (280, None)]
    list(rows(replace(search, every=2)))
    asked = [(offload_of(model).host_gib, offload_of(model).every) for model in models]
    assert asked == [(host_gib, 1), (None, 2)]


def offload_of(model: Any) -> CheckpointOffload:
    record = record_of(model.get_base_model())
    assert record is not None
    assert record.offload is not None
    return record.offload


def test_lengths_are_tried_without_a_search(search_of: Callable[..., Search], gpu: list[int]):
    tries = ((1.0, 40), (1.0, 72), (1.0, 96), (1.0, 104), (2.0, 160), (3.0, 300), (0.5, 80))
    search = replace(search_of("eager"), timed=(), limits=(0.5, 1.0, 2.0, 3.0), tries=tries)
    found = list(rows(search))
    assert gpu == [80, 40, 72, 96, 160, 300]
    nothing, small, middle, large = summary(search, found, "", 8)
    assert nothing["failure"] == "out of memory at 80 tokens"
    assert [(row["tokens"], row.get("at_least")) for row in (small, middle, large)] == [
        (72, True),
        (160, True),
        (160, True),
    ]


def test_a_row_is_written_and_printed_before_the_next(
    search_of: Callable[..., Search], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    asked, results = tmp_path / "request", tmp_path / "results"
    search = replace(search_of("eager"), tries=((1.0, 8),), guesses=((1.0, 16),))
    asked.write_text(json.dumps(asdict(search)), encoding="utf-8")

    def two(given: Search):
        assert given == search
        yield {"tokens": 8}
        assert results.read_text(encoding="utf-8") == capsys.readouterr().out == '{"tokens": 8}\n'
        yield {"tokens": 16}

    monkeypatch.setattr(row_search, "rows", two)
    row_search.main(asked, results)
    assert results.read_text(encoding="utf-8").count("\n") == 2


@pytest.fixture
def whole_attention(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    whole = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", whole)
    return whole


@pytest.mark.parametrize("blocks_of_a_call", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_long_rows_attend_within_blocks(
    whole_attention: Callable[..., torch.Tensor],
    batch: int,
    blocks_of_a_call: int,
    monkeypatch: pytest.MonkeyPatch,
):
    most = 4 * batch * 4 * 6 * blocks_of_a_call
    monkeypatch.setattr(attention_blocks, "MOST_NUMBERS", most)
    asked: list[int] = []

    def counted(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        asked.append(query.numel())
        return whole_attention(query, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    attention_blocks.install(8, block=4)
    attention = torch.nn.functional.scaled_dot_product_attention
    q = torch.randn(batch, 4, 12, 6)
    k, v = torch.randn(2, batch, 2, 12, 6)
    how = {"is_causal": True, "enable_gqa": True}
    blocks = [
        whole_attention(*(each[:, :, i : i + 4] for each in (q, k, v)), **how)
        for i in range(0, 12, 4)
    ]
    torch.testing.assert_close(attention(q, k, v, **how), torch.cat(blocks, 2))
    assert max(asked) == most
    assert sum(asked) == q.numel()
    short = [each[:, :, :8] for each in (q, k, v)]
    assert torch.equal(attention(*short, **how), whole_attention(*short, **how))
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    others = {"attn_mask": mask, "enable_gqa": True}
    assert torch.equal(attention(q, k, v, **others), whole_attention(q, k, v, **others))


def test_a_limit_is_a_share_of_the_gpu(monkeypatch: pytest.MonkeyPatch):
    shares: list[float] = []
    total = argparse.Namespace(total_memory=100 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: total)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    free, reserved = 98 * 2**30, 2**30  # 1 GiB is that of a context
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, total.total_memory))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    rooms = [row_search.limit_memory(gib, "cuda") for gib in (24.0, 139.0, None)]
    assert rooms == [24 * 1024, 99 * 1024, 99 * 1024]
    assert row_search.limit_memory(24.0, "cpu") is None
    assert shares == [0.24, 1.0, 1.0]


def test_failures_of_the_search_are_no_memory_errors(
    search_of: Callable[..., Search], monkeypatch: pytest.MonkeyPatch, capsys
):
    def failing(*_):
        raise ValueError("no such model")

    monkeypatch.setitem(lora_contenders.CONTENDERS, "eager", failing)
    with pytest.raises(ValueError, match="no such model"):
        list(rows(search_of("eager")))
    assert "Traceback" in capsys.readouterr().err
    assert isinstance(row_search.attempt(lambda: failing()), Failure)
