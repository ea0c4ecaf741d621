"""The benchmark of the longest rows: its search, its contenders, and what it says of them."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import attention_blocks, longest_row, lora_contenders, row_search
from benchmarks.__main__ import main
from benchmarks.guided_search import candidates, expected_longest, width
from benchmarks.longest_report import longest_cells, terminal_longest_table
from benchmarks.longest_row import MODELS, Limits, run_case, summary
from benchmarks.lora_contenders import OFFLOADED, Setting
from benchmarks.lora_step import CHECKPOINTED, run_process
from benchmarks.measure import Failure
from benchmarks.models import Model
from benchmarks.picture import draw_all
from benchmarks.row_search import Search, rows
from benchmarks.sft_step import tiny_tokenizer
from benchmarks.step_tables import longest_rows_table, longest_summary
from liger_patch.patch.forward import record_of
from liger_patch.patch.offload import CheckpointOffload

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning"
)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TINY = Model("tiny", LlamaConfig(**SIZES, **HEADS), sequences=1)
LORA, QLORA = CHECKPOINTED
SEARCH = Search("eager", "tiny", "", LORA, (1.0, 2.0), 8, 96, (16,), 1, "cpu")


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


def test_models_have_the_sizes_of_their_names():
    for model, billions in zip(MODELS, (8.03, 8.19), strict=True):
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
        assert sum(p.numel() for p in built.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)
        assert model.config.max_position_embeddings >= longest_row.MOST


@pytest.mark.parametrize("contender", ["eager", "liger_patch"])
def test_a_contender_searches_up_to_the_most(search_of: Callable[..., Search], contender: str):
    """On the CPU every row fits."""
    found = list(rows(search_of(contender)))
    assert found[0]["timed"] == 16
    assert found[0]["ms"] > 0
    steps = found[1:]
    assert [row["tokens"] for row in steps if row["gib"] == 1.0] == [8, 16, 32, 64, 96]
    assert [row["tokens"] for row in steps if row["gib"] == 2.0] == [96]  # known
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
        (1.0, 64, None),
        (1.0, 80, None),
        (1.0, 88, "out of memory"),
        (2.0, 80, None),
        (2.0, 184, None),
        (2.0, 192, "out of memory"),
        (3.0, 184, None),
        (3.0, 288, "out of memory"),
        (3.0, 280, None),
    ]
    assert gpu[4:] == [80, 88, 184, 192, 288, 280]
    lines = list(summary(search, found, "", 8))[2:]
    assert [row["tokens"] for row in lines] == [80, 184, 280]
    assert not any(row.get("at_least") for row in lines)


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


def test_a_row_that_fits_less_memory_is_a_lower_bound(search_of: Callable[..., Search]):
    search = replace(search_of("eager"), timed=(64,), limits=(1.0, 2.0, 3.0, 4.0))
    steps = [
        {"timed": 64, "tokens": 64, "ms": 1.0, "reserved_mib": 2500.0},
        {"gib": 1.0, "tokens": 8, "reserved_mib": 900.0},
        {"gib": 1.0, "tokens": 16, "failure": "out of memory"},
    ]
    lines = list(summary(search, steps, "takes longer than 5 s", 8))[1:]
    assert [(row["tokens"], row.get("at_least", False)) for row in lines] == [
        (8, False),
        (8, True),
        (64, True),
        (64, True),
    ]


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
    list(rows(search))
    bounds = [offload_of(model).host_gib for model in models]
    assert bounds == [host_gib, None]


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


def test_processes_share_the_time_that_is_left():
    assert Limits().seconds_left(10.0, 2) is None
    assert Limits(seconds=30.0).seconds_left(100.0, 2) == 30.0
    assert Limits(total=100.0).seconds_left(40.0, 3) == 20.0
    assert Limits(total=100.0, seconds=15.0).seconds_left(40.0, 3) == 15.0
    assert Limits(total=100.0).seconds_left(101.0, 1) == 0.0


def test_a_row_is_written_and_printed_before_the_next(
    search_of: Callable[..., Search], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    asked, results = tmp_path / "request", tmp_path / "results"
    search = replace(search_of("eager"), tries=((1.0, 8),))
    asked.write_text(json.dumps(asdict(search)), encoding="utf-8")

    def two(given: Search):
        assert given == search
        yield {"tokens": 8}
        assert results.read_text(encoding="utf-8") == capsys.readouterr().out == '{"tokens": 8}\n'
        yield {"tokens": 16}

    monkeypatch.setattr(row_search, "rows", two)
    row_search.main(asked, results)
    assert results.read_text(encoding="utf-8").count("\n") == 2


def test_a_process_that_is_ended_leaves_its_rows():
    made_up = (
        "import sys, time, types\n"
        "def main(request, results):\n"
        "    results.write_text('{\"tokens\": 8}\\n')\n"
        "    time.sleep(600)\n"
        "sys.modules['benchmarks.made_up'] = types.SimpleNamespace(main=main)\n"
    )
    found: list[dict] = []
    failure = run_process("made_up", "", made_up, 5.0, found)
    assert found == [{"tokens": 8}]
    assert failure == "takes longer than 5 s"


SLEEPER = """import sys, time, types
def main(request, results):
    results.write_text('{"gib": 1.0, "tokens": 8}\\n')
    time.sleep(600)
sys.modules["benchmarks.row_search"] = types.SimpleNamespace(main=main)
blocks = types.SimpleNamespace(install=lambda tokens: None)
sys.modules["benchmarks.attention_blocks"] = blocks
"""


def test_a_signal_leaves_the_rows_of_all_contenders(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(longest_row, "ALLOCATOR", SLEEPER)
    monkeypatch.setattr(longest_row, "save", lambda *_: None)
    before = signal.signal(signal.SIGALRM, lambda *_: sys.exit("ended"))
    limits, found = Limits(gib=(1.0, 2.0), timed=(16,), seconds=5.0), []

    def collect() -> None:
        for row in run_case(TINY, LORA, ("eager", "liger_patch", "Unsloth"), limits):
            found.append(row)
            if len(found) == 3:  # eager's: the next process is at work when the signal comes
                signal.setitimer(signal.ITIMER_REAL, 3.0)

    try:
        with pytest.raises(SystemExit, match="ended"):
            collect()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    late, ended = "takes longer than 5 s", "not reached: ended"
    assert [(row["contender"], row.get("tokens"), row.get("failure")) for row in found] == [
        ("eager", None, late),
        ("eager", 8, None),
        ("eager", 8, None),
        ("liger_patch", None, ended),
        ("liger_patch", 8, None),
        ("liger_patch", 8, None),
    ]
    assert all(row["at_least"] for row in found if "tokens" in row)


def test_a_search_that_ends_early_has_a_lower_bound():
    named = {"model": "tiny, LoRA + checkpointing", "contender": "eager"}
    steps = [
        {**named, "timed": 16, "ms": 2.0, "peak_mib": 1.0},
        {**named, "gib": 1.0, "tokens": 8},
        {**named, "gib": 1.0, "tokens": 16},
        {**named, "gib": 1.0, "tokens": 32, "failure": "out of memory"},
    ]
    timed, cut, untried = summary(SEARCH, steps, "takes longer than 1 s", 8)
    assert timed["ms"] == 2.0
    assert (cut["tokens"], cut["at_least"]) == (16, True)
    assert (untried["tokens"], untried["at_least"]) == (16, True)
    nothing = list(summary(SEARCH, [], "does not run", 8))
    assert [row["failure"] for row in nothing] == ["does not run"] * 3


@pytest.mark.slow
def test_each_contender_has_a_process(capfd):
    limits = Limits(gib=(1.0,), step=16, most=32, timed=(16,), whole=16, rounds=1, seconds=300.0)
    found = list(run_case(TINY, LORA, ("eager", "liger_patch"), limits, device="cpu"))
    assert [row["contender"] for row in found] == ["eager"] * 2 + ["liger_patch"] * 2
    assert [row["tokens"] for row in found if "gib" in row] == [32, 32]
    assert all(row["ms"] > 0 for row in found if "timed" in row)
    assert "tiny, LoRA + checkpointing: liger_patch ..." in capfd.readouterr().out


def test_a_model_that_cannot_be_saved_is_the_failure_of_all(monkeypatch: pytest.MonkeyPatch):
    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(longest_row, "save", full)
    found = list(run_case(TINY, LORA, ("eager", "Unsloth"), Limits(), device="cpu"))
    assert {row["failure"] for row in found} == {"does not run: OSError: disk full"}


@pytest.fixture
def whole_attention(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    whole = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", whole)
    return whole


@pytest.mark.parametrize("batch", [1, 2])
def test_long_rows_attend_within_blocks(whole_attention: Callable[..., torch.Tensor], batch: int):
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


def made_up() -> list[dict]:
    name = {"model": "tiny, QLoRA", "whole_attention": 65536}
    eager, ours = ({**name, "contender": each} for each in ("eager", "liger_patch"))
    return [
        {**eager, "timed": 1000, "ms": 4.0},
        {**eager, "gib": 24.0, "tokens": 8192},
        {**eager, "gib": 48.0, "failure": "does not run"},
        {**ours, "timed": 1000, "ms": 3.0},
        {**ours, "gib": 24.0, "tokens": 122880, "at_least": True},
        {**ours, "gib": 48.0, "tokens": 163840, "ends_with": "RuntimeError: host memory"},
    ]


def test_tables_have_a_line_for_each_memory_and_length():
    head, timed, small, large = longest_cells(made_up())
    assert head[1:] == ["eager", "liger_patch"]
    assert timed == ["tiny, QLoRA, 1,000 tokens", "4.0 (1.00 of eager)", "3.0 (0.75 of eager)"]
    assert small == ["tiny, QLoRA, 24 GiB", "8,192", ">= 122,880"]
    assert large == ["tiny, QLoRA, 48 GiB", "does not run", "163,840 (RuntimeError: host memory)"]
    assert "0.75 of eager" in terminal_longest_table(made_up())
    report = {"gpu": "GPU", "date": "2026-01-01", "versions": {"torch": "2.6"}, "command": "c"}
    note = longest_rows_table(report | {"longest_rows": made_up()}).splitlines()[-1]
    assert note.endswith("Rows of more than 65,536 tokens attend within blocks of 8192.")


def test_a_picture_has_the_rows_that_were_found(tmp_path: Path):
    versions = {"torch": "2.6", "triton": "3.2"}
    report = {"gpu": "GPU", "date": "2026-01-01", "versions": versions, "command": "c"}
    partly = {**report, "longest_rows": made_up()}  # bounds, failures, no more than one point
    assert draw_all(partly, tmp_path / "longest_row.json") == [tmp_path / "longest_row.png"]
    assert (tmp_path / "longest_row.png").stat().st_size > 10_000
    nothing = [row for row in made_up() if "tokens" not in row]
    assert draw_all({**report, "longest_rows": nothing}, tmp_path / "longest_row.json") == []


def test_a_sentence_has_every_contender_in_the_least_memory():
    said = longest_summary({"longest_rows": made_up()})
    found = "The longest row of tiny, QLoRA in 24 GiB, in tokens: eager 8,192; liger_patch at least"
    assert said.startswith(f"{found} 122,880: [all lengths")
    assert "(docs/memory.md#the-longest-row)" in said


def test_times_of_two_runs_are_on_two_lines():
    rows = [{**row, "run": 1 + (row["contender"] == "liger_patch")} for row in made_up()]
    _, first, second, small, _ = longest_cells(rows)
    assert first == ["tiny, QLoRA, 1,000 tokens, run 1", "4.0 (1.00 of eager)", ""]
    assert second == ["tiny, QLoRA, 1,000 tokens, run 2", "", "3.0"]  # no eager in that run
    assert small == ["tiny, QLoRA, 24 GiB", "8,192", ">= 122,880"]
    report = {"gpu": "GPU", "date": "2026-01-01", "versions": {"torch": "2.6"}, "command": "c"}
    assert "Run 1 is the first command" in longest_rows_table(report | {"longest_rows": rows})


def test_rows_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    measured = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def measure(model: Model, setting: Setting, contenders: list[str], limits: Limits):
        measured.append((model.name, setting.name, contenders, limits))
        return made_up()

    monkeypatch.setattr(longest_row, "run_case", measure)
    options = ["--model", "Llama-3.1-8B, QLoRA", "--contender", "liger_patch", "--gib", "24"]
    options += ["--limit", "9", "--timed", "64", "--whole-attention", "32", "--rounds", "1"]
    assert main(["longest_row", *options, "--output", str(tmp_path)]) == 0
    limits = Limits(gib=[24.0], timed=[64], whole=32, rounds=1, seconds=9.0)
    assert measured == [("Llama-3.1-8B", QLORA.name, ["liger_patch"], limits)]
    options = ["--try", "24:16384", "--try", "48:40960", "--host-gib", "120", "--rounds", "1"]
    options += ["--total", "540"]
    assert main(["longest_row", *options, "--output", str(tmp_path)]) == 0
    tries = ((24.0, 16384), (48.0, 40960))
    limits = Limits(gib=[24.0, 48.0], timed=(), rounds=1, tries=tries, host_gib=120.0, total=540.0)
    assert measured[-1][-1] == limits
    report = json.loads((tmp_path / "longest_row.json").read_text(encoding="utf-8"))
    assert "--try 24:16384 --try 48:40960" in report["command"]


@pytest.mark.parametrize("text", ["24", "24:", "24:x", "x:8192", "24:9000", "24:0"])
def test_lengths_that_are_tried_are_checked(text: str, capsys):
    with pytest.raises(SystemExit):
        main(["longest_row", "--try", text])
    assert "--try" in capsys.readouterr().err


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
