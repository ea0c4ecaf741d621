"""The benchmark of updates of TRL's trainers: its contenders, Unsloth's process, generation."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
from slow_cases import slow_but
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.lora_step import save
from benchmarks.names import UNSLOTH

pytest.importorskip("trl", reason="the updates are TRL's")

from benchmarks import rl_unsloth
from benchmarks.rl_step import CONTENDERS, GENERATION, run_update
from benchmarks.rl_updates import GROUP, Update

pytestmark = pytest.mark.filterwarnings(
    "ignore:.gradient_checkpointing_(en|dis)able. is deprecated:FutureWarning"
)
SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}
CONFIG = LlamaConfig(**SIZES, tie_word_embeddings=True)
GRPO = Update("tiny", CONFIG, 2 * GROUP, lora_rank=4, trainer="GRPO", prompt=4, completion=6)
DPO = replace(GRPO, sequences=4, trainer="DPO")


@pytest.mark.parametrize(
    ("update", "checkpointing"),
    slow_but([(DPO, False), (GRPO, True)], [*product([DPO, GRPO], [False, True])]),
    ids=lambda value: getattr(value, "trainer", str(value)),
)
def test_updates_are_run_with_trls_head_and_with_ours(update: Update, checkpointing: bool):
    update = replace(update, checkpointing=checkpointing)
    rows = [*run_update(update, rounds=1, names=CONTENDERS, device="cpu")]
    assert [row["contender"] for row in rows] == [*CONTENDERS]
    assert not any("wrong" in row for row in rows)
    assert all(row["ms"] > 0 < row["gradient_norm"] for row in rows)
    assert all(row["tokens"] == rows[0]["tokens"] > 0 for row in rows)  # no flash attention here


class StandIn:
    """What Unsloth offers, without its patches."""

    @staticmethod
    def from_pretrained(folder: str, *, dtype: Any, **_: Any) -> tuple[Any, None]:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), None

    @staticmethod
    def get_peft_model(
        model: Any, *, max_seq_length: int, use_gradient_checkpointing: Any, **lora: Any
    ) -> Any:
        model = peft.get_peft_model(model, peft.LoraConfig(**lora))
        model.for_training = lambda use_gradient_checkpointing: model.train()
        return model


def test_unsloths_process_computes_trls_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(FastLanguageModel=StandIn))
    (trls,) = run_update(GRPO, rounds=1, names=["TRL"], device="cpu")
    save(replace(GRPO, lora_rank=None), str(tmp_path), "cpu")
    request, results = tmp_path / "request", tmp_path / "results"
    request.write_text(rl_unsloth.request_of(GRPO, str(tmp_path), 1, "cpu"))
    rl_unsloth.main(request, results)
    row = json.loads(results.read_text())
    assert row["loss"] == pytest.approx(trls["loss"], rel=0.02)
    assert row["gradient_norm"] == pytest.approx(trls["gradient_norm"], rel=0.05)
    assert row["tokens"] == trls["tokens"]
    assert row["ms"] > 0
    monkeypatch.delattr(StandIn, "from_pretrained")
    rl_unsloth.main(request, results)
    (failure,) = json.loads(results.read_text()).values()
    assert failure.startswith("does not run: AttributeError")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("unsloth") is not None, reason="it needs a GPU")
def test_unsloth_has_a_process_and_is_reported_where_it_is_missing(capfd):
    (row,) = run_update(GRPO, rounds=1, names=[UNSLOTH], device="cpu")
    missing = "does not run: exit status 1: ModuleNotFoundError: No module named 'unsloth'"
    assert row == {"model": "tiny", "contender": UNSLOTH, "failure": missing}
    assert "Traceback" in capfd.readouterr().err


def test_generation_is_measured_beside_updates(capsys):
    rows = [*run_update(GRPO, rounds=1, names=["TRL"], generation=True, device="cpu")]
    assert [row["contender"] for row in rows] == ["TRL", GENERATION]
    assert rows[-1]["ms"] > 0
    said = capsys.readouterr().out
    assert f"tiny: {rows[-1]['steps']} steps of generation in " in said
    assert "  TRL: " in said
