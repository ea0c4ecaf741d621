"""Losses of a trainer's own read a patched model's logits as an eager one's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_but
from torch import Tensor
from torch.nn.functional import cross_entropy
from trainer_runs import assert_same_training, make_model, make_trainer
from transformers import Trainer

from liger_patch import apply_patch, patch_status

pytestmark = pytest.mark.usefixtures("imported_objects_are_not_collected")
WITHOUT_LABELS = "liger_patch .* called without labels"


def shifted_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits[..., :-1, :].contiguous()
    return cross_entropy(logits.view(-1, logits.shape[-1]), labels[..., 1:].reshape(-1))


def cross_entropy_of_logits(model, inputs):
    outputs = model(**inputs)
    return shifted_cross_entropy(outputs.logits, inputs["labels"]), outputs


def cross_entropy_of_a_call_without_labels(model, inputs):
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    return shifted_cross_entropy(outputs.logits, labels), outputs


def models_loss_and_a_penalty_on_logits(model, inputs):
    outputs = model(**inputs)
    return outputs.loss + 0.1 * outputs.logits.float().logsumexp(-1).square().mean(), outputs


@pytest.mark.parametrize(
    "loss_of",
    [
        cross_entropy_of_logits,
        cross_entropy_of_a_call_without_labels,
        models_loss_and_a_penalty_on_logits,
    ],
)
@pytest.mark.filterwarnings(f"ignore:{WITHOUT_LABELS}:UserWarning")
@pytest.mark.parametrize("model_type", slow_but(["gemma2"], ["llama", "gemma2"]))
def test_a_trainers_own_compute_loss_trains_as_eager(
    model_type: str, loss_of: Callable, tmp_path: Path
) -> None:
    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = loss_of(model, inputs)
            return (loss, outputs) if return_outputs else loss

    assert_same_training(model_type, tmp_path, trainer_class=OwnLoss)


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    assert type(outputs["logits"]) is Tensor  # a call without labels is not touched
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    loss = cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"label_smoothing_factor": 0.1}, id="label_smoothing_factor"),
        pytest.param({"compute_loss_func": own_loss}, id="compute_loss_func"),
    ],
)
@pytest.mark.parametrize("model_type", slow_but(["gemma2"], ["llama", "gemma2"]))
def test_losses_outside_the_model_train_as_eager(
    model_type: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """And say so, once."""
    with pytest.warns(UserWarning, match=WITHOUT_LABELS) as said:
        model = assert_same_training(model_type, tmp_path, gradient_accumulation_steps=2, **options)
    assert len([each for each in said if "liger_patch" in str(each.message)]) == 1
    assert "without labels" in (patch_status(model).reason or "")


def test_a_fused_loss_is_demanded_of_a_trainer_that_computes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "0")
    trainer = make_trainer(apply_patch(make_model()), tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(RuntimeError, match=r"apply_patch\(label_smoothing=...\)"):
        trainer.train()
