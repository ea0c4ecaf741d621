"""LoRA adapters with TRL: those of layers run on kernels; those of the head, which TRL's own fused
head leaves out, are an error, never a wrong number.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from trl_models import MARKS, apply_trl_patch, lora, sft_trainer, with_head

pytestmark = MARKS
MODULES = ["q_proj", "lm_head"]


def test_trl_refuses_them_with_the_flag_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        sft_trainer(tiny_model(), tmp_path, True, options=lora(target_modules=MODULES))


def test_trls_head_never_leaves_out_those_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    model, batch = apply_trl_patch(with_head(tiny_model())), tiny_batch(tiny_model())
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
