"""Calls that are left to TRL's own head: environment variables, and heads that cannot be fused.
Adapters of the head, which TRL's head leaves out, are an error, never a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import assert_same_bits
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import assert_fused
from transformers import PreTrainedModel
from trl_models import (
    LEFT_TO_TRL,
    MARKS,
    apply_trl_patch,
    call,
    lora,
    sft_trainer,
    train,
    with_head,
    with_head_changed,
)
from unusual_heads import sharded

from liger_patch import apply_patch, patch_status

pytestmark = MARKS


def test_return_logits_is_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trls = train(sft_trainer(tiny_model("gemma2"), tmp_path))
    trainer = sft_trainer(apply_patch(tiny_model("gemma2"), layers=False), tmp_path, True)
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    assert_same_bits(train(trainer), trls)
    status = patch_status(trainer.model)
    assert (status.fused, status.reason) == (False, "LIGER_PATCH_RETURN_LOGITS=1")
    monkeypatch.delenv("LIGER_PATCH_RETURN_LOGITS")
    trainer.evaluate()
    assert_fused(trainer.model)


def doubled(head: nn.Linear) -> None:
    head.__class__ = Doubled


class Doubled(nn.Linear):
    """Computes more than its product."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.logaddexp(super().forward(input), torch.zeros(()))


def hooked(head: nn.Linear) -> None:
    head.register_full_backward_hook(lambda *_: None)


def in_bfloat16() -> PreTrainedModel:
    """Where TRL wants the product in float32."""
    return with_head(tiny_model(dtype=torch.bfloat16), cast_lm_head_to_fp32=True)


@pytest.mark.parametrize(
    ("make", "reason", "backbone"),
    [  # the backbone runs twice where only then is known what the logits are
        (partial(with_head_changed, sharded), "the head", 2),
        (partial(with_head_changed, doubled), "the head", 2),
        (partial(with_head_changed, hooked), "backward hooks of the head", 1),
        (in_bfloat16, "the head is not in float32", 2),
    ],
)
def test_a_head_that_cannot_be_fused_is_left_to_trl(
    make: Callable[[], PreTrainedModel],
    reason: str,
    backbone: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one warning."""
    model = make()
    batch = tiny_batch(model)
    trls = call(model, batch)
    apply_trl_patch(model, layers=False)
    calls: list[Any] = []
    model.model.register_forward_hook(lambda *args: calls.append(args))
    with pytest.warns(UserWarning, match=f"{LEFT_TO_TRL}.*{reason}") as warned:
        assert_same_bits(call(model, batch), trls)
    assert len(warned) == 1
    assert len(calls) == backbone
    for _ in range(2):  # a warning would be an error
        assert_same_bits(call(model, batch), trls)
    assert len(calls) == backbone + 2
    status = patch_status(model)
    assert status.fused is False
    assert reason in status.reason
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    assert_same_bits(call(model, batch), trls)
    monkeypatch.delenv("LIGER_PATCH_RETURN_LOGITS")
    assert_same_bits(call(model, batch), trls)
    assert patch_status(model).reason == status.reason


@pytest.mark.parametrize("called_before", [False, True])
def test_where_fusing_is_demanded_a_head_that_cannot_be_fused_is_an_error(
    called_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = apply_trl_patch(with_head_changed(sharded))
    batch = tiny_batch(model)
    if called_before:
        with pytest.warns(UserWarning, match=LEFT_TO_TRL):
            model(**batch, fused_lm_head=True)
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "0")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"LIGER_PATCH_RETURN_LOGITS=0 demands.*the head"):
            model(**batch, fused_lm_head=True)


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
