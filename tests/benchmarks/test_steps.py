"""The benchmarks of LoRA steps, of the longest rows and of updates of TRL's trainers: their
contenders, on a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow_but
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import row_search
from benchmarks.__main__ import main
from benchmarks.frozen_base_check import run_case as run_check
from benchmarks.longest_row import summary
from benchmarks.lora_contenders import Request, Setting, is_measured, rows
from benchmarks.lora_step import CHECKPOINTED, SETTINGS
from benchmarks.markdown import plain_table
from benchmarks.models import Model
from benchmarks.names import FP8, LOWER_BOUND, OFFLOADED, OURS
from benchmarks.rl_step import CONTENDERS, GENERATION, run_update
from benchmarks.rl_updates import GROUP, Update
from benchmarks.row_search import Limits, Search
from benchmarks.sft_step import tiny_tokenizer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing(_enable|_disable)?. is deprecated:FutureWarning",
    "ignore:liger_patch offloads no checkpoint",  # of a CPU
)
# multiples of 64: bitsandbytes 0.50 takes scales of other blocks for other sizes on a CPU
SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}
TINY = Model("tiny", LlamaConfig(**SIZES), sequences=2, length=9)


@pytest.fixture
def request_of(tmp_path: Path) -> Callable[..., Request]:
    """Save the tiny model, and return what asks for it."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(TINY.config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)

    def request(contender: str, *settings: Setting) -> Request:
        return Request(contender, "tiny", str(tmp_path), 2, 9, settings, rounds=1, device="cpu")

    return request


@pytest.mark.parametrize(
    "setting", slow_but([SETTINGS[0], SETTINGS[-1]], SETTINGS), ids=lambda setting: setting.name
)
def test_ours_computes_what_eager_does(request_of: Callable[..., Request], setting: Setting):
    if setting.quantized:
        pytest.importorskip("bitsandbytes")
    found = [*rows(request_of("eager", setting)), *rows(request_of("liger_patch", setting))]
    assert {row.pop("model") for row in found} == {f"tiny, {setting.name}"}
    by_name = {row["contender"]: row for row in found}
    names = ["eager", *([] if setting.quantized else [LOWER_BOUND]), "liger_patch"]
    assert list(by_name) == names
    eager, ours = by_name["eager"], by_name["liger_patch"]
    # the same step, of a few tokens in bf16; tests/layers has what is exact
    assert ours["loss"] == pytest.approx(eager["loss"], rel=5e-3)
    assert ours["gradient_norm"] == pytest.approx(eager["gradient_norm"], rel=0.05)
    assert eager["gradient_norm"] > 0
    for row in (eager, ours):
        assert row["adapters"] == "float32"
        assert row["attention"] == "sdpa"
        assert row["trained"] == ours["trained"] > 0
        assert row["first_step_s"] > 0
    assert all(row["ms"] > 0 for row in found)


def test_a_base_in_fp8_is_another_contender(request_of: Callable[..., Request]):
    found = [row for name in ("eager", FP8) for row in rows(request_of(name, SETTINGS[0]))]
    eager, ours = found[0], found[-1]
    assert ours["contender"] == FP8
    assert ours["trained"] == eager["trained"]
    assert ours["loss"] == pytest.approx(eager["loss"], rel=0.02)
    assert ours["loss"] != eager["loss"]
    assert not is_measured(FP8, SETTINGS[1])  # QLoRA


def test_a_frozen_base_rounds_the_more_the_fewer_its_bits() -> None:
    pytest.importorskip("bitsandbytes")
    found = [*run_check(TINY, device="cpu")]
    assert all(0 < row["loss_error"] < 0.05 for row in found)
    error = {(row["model"], row["contender"]): row["gradients_error"] for row in found}
    bf16, nf4 = "tiny, LoRA", "tiny, QLoRA"
    assert 0 < error[bf16, "eager"] < error[bf16, FP8] < error[nf4, OURS] < 1
    assert error[bf16, OURS] == pytest.approx(error[bf16, "eager"], rel=0.5)
    assert error[nf4, OURS] == pytest.approx(error[nf4, "eager"], rel=0.5)


LIMITS = Limits((1.0, 2.0), step=8, most=96, timed=(16,), whole=8, rounds=1)
SEARCH = Search("eager", "tiny", "", CHECKPOINTED[0], LIMITS, "cpu")


@pytest.mark.parametrize("contender", ["eager", "liger_patch"])
def test_a_contender_searches_up_to_the_most(request_of: Callable[..., Request], contender: str):
    """On the CPU every row fits."""
    search = replace(SEARCH, contender=contender, folder=request_of(contender).folder)
    found = list(row_search.rows(search))
    assert found[0]["timed"] == 16
    assert found[0]["ms"] > 0
    steps = found[1:]
    assert [row["tokens"] for row in steps if row["gib"] == 1.0] == [8, 16, 32, 64, 96]
    assert not [row for row in steps if row["gib"] == 2.0]  # known
    _, small, large = summary(search, found, "does not run: exit status 0: ")
    assert (small["tokens"], large["tokens"]) == (96, 96)
    assert small["at_least"]
    assert large["at_least"]
    assert not any("failure" in row for row in steps)


@pytest.mark.slow
def test_the_gradients_of_a_row_are_those_of_its_blocks(tmp_path: Path, capsys, monkeypatch):
    pytest.importorskip("bitsandbytes")
    whole = torch.nn.functional.scaled_dot_product_attention
    # which is put back behind the test
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", whole)
    assert main(["long_row_check", "--device", "cpu", "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "long_row_check.json").read_text(encoding="utf-8"))
    rows = report["long_row_check"]
    assert all(row["holds"] for row in rows)
    assert [row["tokens"] for row in rows] == [64, 160, 64, 64, 64, 64, 160, 160, 160]
    errors = [row for row in rows if "error" in row]
    assert all(0 < row["eager_error"] < 0.05 for row in errors)
    assert all(row["error"] > 0 for row in errors)
    assert {row["loss"] > 0 for row in rows if "loss" in row} == {True}
    table = plain_table(rows)
    assert table in capsys.readouterr().out
    assert "160     gradient of the embeddings, 80 to 95 " in table


TIED = LlamaConfig(**SIZES, tie_word_embeddings=True)
GRPO = Update("tiny", TIED, 2 * GROUP, lora_rank=4, trainer="GRPO", prompt=4, completion=6)
DPO = replace(GRPO, sequences=4, trainer="DPO")


@pytest.mark.parametrize(
    ("update", "checkpointing"),
    slow_but([(DPO, False), (GRPO, True)], [*product([DPO, GRPO], [False, True])]),
    ids=lambda value: getattr(value, "trainer", str(value)),
)
def test_updates_are_run_with_trls_head_and_with_ours(update: Update, checkpointing: bool):
    pytest.importorskip("trl", reason="the updates are TRL's")
    update = replace(update, checkpointing=checkpointing)
    rows = [*run_update(update, rounds=1, names=CONTENDERS, device="cpu")]
    expected = [name for name in CONTENDERS if checkpointing or name != OFFLOADED]
    assert [row["contender"] for row in rows] == expected
    assert not any("wrong" in row for row in rows)
    assert all(row["ms"] > 0 < row["gradient_norm"] for row in rows)
    assert all(row["tokens"] == rows[0]["tokens"] > 0 for row in rows)  # no flash attention here
    if update.trainer == "DPO":  # its reference has the policy's numbers: nothing else is compared
        assert all(row["loss"] == pytest.approx(log(2), rel=1e-6) for row in rows)


def test_generation_is_measured_beside_updates(capsys):
    pytest.importorskip("trl", reason="the updates are TRL's")
    rows = [*run_update(GRPO, rounds=1, names=["TRL"], generation=True, device="cpu")]
    assert [row["contender"] for row in rows] == ["TRL", GENERATION]
    assert rows[-1]["ms"] > 0
    said = capsys.readouterr().out
    assert f"tiny: {rows[-1]['steps']} steps of generation in " in said
    assert "  TRL: " in said
