"""The benchmark of updates of TRL's trainers: its contenders, Unsloth's process, generation."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import log
from typing import Any

import pytest
from slow_cases import slow_but
from transformers import LlamaConfig

pytest.importorskip("trl", reason="the updates are TRL's")

from benchmarks.names import OFFLOADED
from benchmarks.rl_step import CONTENDERS, GENERATION, run_update
from benchmarks.rl_updates import GROUP, Update

pytestmark = pytest.mark.filterwarnings(
    "ignore:.gradient_checkpointing_(en|dis)able. is deprecated:FutureWarning",
    "ignore:liger_patch offloads no checkpoint",  # of a CPU
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
    expected = [name for name in CONTENDERS if checkpointing or name != OFFLOADED]
    assert [row["contender"] for row in rows] == expected
    assert not any("wrong" in row for row in rows)
    assert all(row["ms"] > 0 < row["gradient_norm"] for row in rows)
    assert all(row["tokens"] == rows[0]["tokens"] > 0 for row in rows)  # no flash attention here
    if update.trainer == "DPO":  # its reference has the policy's numbers: nothing else is compared
        assert all(row["loss"] == pytest.approx(log(2), rel=1e-6) for row in rows)


def test_generation_is_measured_beside_updates(capsys):
    rows = [*run_update(GRPO, rounds=1, names=["TRL"], generation=True, device="cpu")]
    assert [row["contender"] for row in rows] == ["TRL", GENERATION]
    assert rows[-1]["ms"] > 0
    said = capsys.readouterr().out
    assert f"tiny: {rows[-1]['steps']} steps of generation in " in said
    assert "  TRL: " in said
