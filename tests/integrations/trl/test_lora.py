"""LoRA adapters with TRL: those of layers run on kernels; those of the head, which TRL's own fused
head leaves out, are an error, never a wrong number.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lora_models import ALL, MLP, OUT, QKV, Calls
from tiny_models import tiny_batch
from training_step import widened
from trl_models import (
    MARKS,
    apply_trl_patch,
    assert_fused,
    assert_same,
    lora,
    make_model,
    sft_trainer,
    train,
    with_head,
)

from liger_patch.layers.replace import count_layers

pytestmark = MARKS
MODULES = ["q_proj", "lm_head"]


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


def test_trl_refuses_them_with_the_flag_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        sft_trainer(make_model(), tmp_path, True, options=lora(target_modules=MODULES))


def test_trls_head_never_leaves_out_those_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    model, batch = apply_trl_patch(with_head(make_model())), tiny_batch(make_model())
    options = lora(target_modules=MODULES, init_lora_weights=False)["peft_config"]
    model = peft.get_peft_model(model, options)
    with torch.no_grad():
        found = model(**batch, fused_lm_head=True)
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    expected = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    mask = labels != -100
    torch.testing.assert_close(found.log_probs[mask], expected[mask])
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    with pytest.raises(RuntimeError, match=r"adapters on its head.*LIGER_PATCH_RETURN_LOGITS=1"):
        model(**batch, fused_lm_head=True)
