"""SFT of LoRA adapters with TRL: they come after the model is made, and run on kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from lora_models import ALL, MLP, OUT, QKV, Calls
from training_step import widened
from trl_models import MARKS, assert_fused, assert_same, lora, make_model, sft_trainer, train

from liger_patch.layers.replace import count_layers

pytestmark = MARKS


@pytest.mark.parametrize("checkpoints", [False, True])
def test_adapters_of_a_configuration_run_on_kernels(
    checkpoints: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, results = Calls(monkeypatch), []
    for patch in (None, True):
        trainer = sft_trainer(
            widened(make_model()),
            tmp_path,
            patch,
            options=lora(target_modules=list(ALL)),
            max_steps=5,
            gradient_checkpointing=checkpoints,
        )
        calls.clear()
        results.append(train(trainer))
        groups, by_peft = calls.taken(trainer.model)
        if patch:
            assert (groups[:3], by_peft) == ([QKV, OUT, MLP], [])
            assert count_layers(trainer.model)["lora"] == 14
            assert_fused(trainer.model)
        else:
            assert groups == []
    trls, ours = results
    assert_same(ours, trls)
