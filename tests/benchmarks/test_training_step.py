"""The benchmark of whole training steps: its models, and what it does to them."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from benchmarks.models import MODELS, Model
from benchmarks.names import LOWER_BOUND
from benchmarks.training_step import run_model

pytestmark = pytest.mark.slow
(WITH_LORA,) = (m for m in MODELS if m.lora_rank is not None and not m.quantized)


def tiny(model: Model) -> Model:
    config = copy.deepcopy(model.config)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    for name, size in (sizes | heads).items():
        setattr(config, name, size)
    return replace(model, config=config, sequences=2, length=9)


@pytest.mark.parametrize("model", [MODELS[0], WITH_LORA], ids=lambda model: model.name)
def test_a_model_is_run_eager_and_patched(model: Model):
    rows = run_model(tiny(model), rounds=1, device="cpu")
    rows = {row["contender"]: row for row in rows}
    assert list(rows)[:2] == [LOWER_BOUND, "eager"]
    assert rows[LOWER_BOUND]["ms"] > 0
    assert rows["liger_patch"]["loss"] == pytest.approx(rows["eager"]["loss"], rel=1e-3)
    for name in ("eager", "liger_patch", "liger_patch, layers"):
        assert rows[name]["ms"] > 0
        assert rows[name]["gradient_norm"] > 0


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")
def test_steps_of_trl_are_run_with_its_head_and_with_ours():
    pytest.importorskip("trl")
    from benchmarks.sft_step import contenders

    rows = run_model(tiny(MODELS[0]), rounds=1, device="cpu", of=contenders)
    rows = {row["contender"]: row for row in rows}
    assert list(rows) == ["TRL", "liger_patch", "liger_patch, layers"]
    assert rows["liger_patch"]["loss"] == pytest.approx(rows["TRL"]["loss"], rel=1e-3)
    assert all(row["ms"] > 0 for row in rows.values())
