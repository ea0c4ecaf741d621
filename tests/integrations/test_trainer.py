"""transformers.Trainer trains, evaluates, saves and resumes a patched model as an eager one; losses
of a trainer's own read its logits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exactness import assert_no_worse, assert_same_bits
from offloaded_models import offloaded
from slow_cases import slow_but
from tiny_models import Batch, tiny_batch, tiny_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from trainers import QUIET, LargestTensor, samples_of
from training_step import Float64, Step, assert_fused, assert_right, assert_same_step, widened

from liger_patch import apply_patch, patch_status
from liger_patch.patch.flags import RETURN_LOGITS

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

pytestmark = pytest.mark.usefixtures("imported_objects_are_not_collected")
MODEL_TYPES = ["llama", "gemma2", "qwen3_moe", "gemma3"]  # plain, softcap, auxiliary loss, vision
LENGTH = 9  # tokens of a sample
OF_TRAINER = ("callbacks", "compute_metrics", "compute_loss_func")


def make_model(model_type: str = "llama") -> PreTrainedModel:
    """A tiny model; of a mixture of experts, one with its auxiliary loss."""
    model = tiny_model(model_type)
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = True
    return model


def eager_and_patched(model_type: str = "llama", **options: Any) -> tuple[Any, Any]:
    return make_model(model_type), apply_patch(make_model(model_type), **options)


def make_samples(model: PreTrainedModel, count: int = 10) -> list[Batch]:
    """With different numbers of supervised tokens."""
    return samples_of(tiny_batch(model, batch=count, length=LENGTH))


class GradientsOfEachStep(TrainerCallback):
    def __init__(self) -> None:
        self.gradients: Step = {}

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        for name, parameter in kwargs["model"].named_parameters():
            gradient = None if parameter.grad is None else parameter.grad.clone()
            self.gradients[f"{state.global_step} {name}"] = gradient


def make_trainer(
    model: PreTrainedModel,
    folder: Path,
    *,
    trainer_class: type[Trainer] = Trainer,
    samples: list[Batch] | None = None,
    **options: Any,
) -> Trainer:
    """With plain SGD without clipping: a loss that is scaled wrongly trains wrongly."""
    of_trainer = {name: options.pop(name) for name in OF_TRAINER if name in options}
    defaults = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "learning_rate": 0.05,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        **QUIET,
    }
    data: Any = make_samples(model) if samples is None else samples
    return trainer_class(
        model=model,
        args=TrainingArguments(str(folder), **{**defaults, **options}),
        train_dataset=data,
        eval_dataset=data,
        **of_trainer,
    )


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(model: PreTrainedModel, folder: Path, **options: Any) -> Step:
    """The loss of each step and each gradient before each optimizer step."""
    recorder = GradientsOfEachStep()
    trainer = make_trainer(model, folder, callbacks=[recorder], **options)
    with Float64() if model.dtype == torch.float64 else contextlib.nullcontext():
        trainer.train()
    assert trainer.state.global_step == len(losses(trainer)) > 1
    return {"loss": torch.tensor(losses(trainer), dtype=torch.float64), **recorder.gradients}


def assert_same_training(model_type: str, folder: Path, **options: Any) -> PreTrainedModel:
    """Hold every loss and gradient to eager's, in float64, and return the patched model."""
    truth = train(widened(make_model(model_type)), folder, **options)
    model = apply_patch(widened(make_model(model_type)))
    assert_same_step(train(model, folder, **options), truth)
    return model


@pytest.mark.parametrize("gradient_accumulation_steps", slow_but([4], [1, 4]))
@pytest.mark.parametrize("model_type", [*MODEL_TYPES, "qwen2_5_vl"])
def test_each_step_has_eagers_loss_and_gradients(
    model_type: str, gradient_accumulation_steps: int, tmp_path: Path
) -> None:
    """Of the number of tokens that Trainer counts, where the signature says that it is taken."""
    # 5 batches an epoch: with 4 accumulated ones, every second step has one
    options = {"gradient_accumulation_steps": gradient_accumulation_steps}
    assert_fused(assert_same_training(model_type, tmp_path, **options))


def checkpointing(use_reentrant: bool) -> dict[str, Any]:
    # Transformers 5.23 has renamed both.
    renamed = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": {"use_reentrant": use_reentrant}}


SETTINGS = {
    "float32": {},
    "bf16": {"bf16": True},
    "checkpointing": checkpointing(False),
    "reentrant checkpointing": checkpointing(True),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("model_type", slow_but(["llama"], MODEL_TYPES))
def test_training_is_no_worse_than_eager(model_type: str, setting: str, tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 4, "learning_rate": 1e-3}
    truth = train(widened(make_model(model_type)), tmp_path, **options)
    eager_model, model = eager_and_patched(model_type)
    options |= SETTINGS[setting]
    eager, ours = (train(each, tmp_path, **options) for each in (eager_model, model))
    assert_fused(model)
    assert_right(ours, eager, truth, torch.bfloat16 if "bf16" in options else torch.float32)


def test_a_model_patched_after_its_trainer_was_made_trains_as_eager(tmp_path: Path) -> None:
    class PatchesLate(Trainer):
        def train(self, *args, **kwargs):
            return super().train(*args, **kwargs) if apply_patch(self.model) else None

    truth = train(widened(make_model()), tmp_path)
    model = widened(make_model())
    ours = train(model, tmp_path, trainer_class=PatchesLate)
    assert_fused(model)
    assert_no_worse(ours, truth, truth, torch.float32)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_offloaded_checkpoints_train_bitwise_as_plain_ones(
    use_reentrant: bool, tmp_path: Path
) -> None:
    """Trainer enables checkpointing after the patch, and evaluates in between."""
    options = {"learning_rate": 1e-3, **checkpointing(use_reentrant)}
    results = []
    for is_offloaded in (False, True):
        model = apply_patch(make_model())
        offload = offloaded(model) if is_offloaded else None
        results.append(train(model, tmp_path, **options))
    assert str(offload).startswith("1 layer inputs")
    assert_same_bits(*results)


@pytest.mark.parametrize("bf16", [False, True])
def test_resumed_training_is_bitwise_uninterrupted_training(bf16: bool, tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "optim": "adamw_torch"}
    whole, resumed = (
        make_trainer(apply_patch(make_model("gemma2")), tmp_path, bf16=bf16, **options)
        for _ in range(2)
    )
    whole.train()
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.zero_()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_fused(resumed.model)
    assert len(losses(whole)) == 4
    assert losses(resumed) == losses(whole)
    assert_same_bits(resumed.model.state_dict(), whole.model.state_dict())


def without_labels(samples: list[Batch]) -> list[Batch]:
    return [{**sample, "labels": torch.full_like(sample["labels"], -100)} for sample in samples]


def test_micro_batches_without_a_label_train_as_eager(tmp_path: Path) -> None:
    samples = make_samples(make_model(), 4)
    samples = [*samples[:2], *without_labels(samples[2:])]
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    assert_fused(assert_same_training("llama", tmp_path, samples=samples, **options))


@pytest.mark.parametrize("bf16", [False, True])
def test_steps_without_a_label_leave_the_weights_alone(bf16: bool, tmp_path: Path) -> None:
    model = apply_patch(make_model("gemma2"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    samples = without_labels(make_samples(model))
    trainer = make_trainer(model, tmp_path, samples=samples, bf16=bf16)
    trainer.train()
    assert_fused(model)
    assert losses(trainer) == [0.0, 0.0, 0.0]
    assert math.isnan(trainer.evaluate()["eval_loss"])  # as eager's
    assert_same_bits(model.state_dict(), before)


@pytest.mark.parametrize("unfused", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_evaluation_leaves_out_batches_without_a_label(
    model_type: str, unfused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Trainer does, from Transformers 5.1x on, because their loss is nan."""
    found = []
    for patch, model in enumerate(eager_and_patched(model_type)):
        monkeypatch.setenv(RETURN_LOGITS, str(int(patch and unfused)))
        samples = make_samples(model, 4)
        samples = [*samples[:1], *without_labels(samples[1:])]
        trainer = make_trainer(model, tmp_path, samples=samples, per_device_eval_batch_size=1)
        found.append(trainer.evaluate()["eval_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_training_and_loss_only_evaluation_hold_no_logits(
    model_type: str, bf16: bool, tmp_path: Path
) -> None:
    largest = {}
    for patch, model in enumerate(eager_and_patched(model_type)):
        # wide batches: their logits are larger than any weight
        sizes = {"per_device_train_batch_size": 10, "per_device_eval_batch_size": 10}
        trainer = make_trainer(model, tmp_path, bf16=bf16, **sizes)
        for part in (trainer.train, trainer.evaluate):
            with LargestTensor() as seen:
                part()
            largest[patch, part.__name__] = seen.elements
    logits = 10 * LENGTH * model.config.vocab_size
    assert {name for name, elements in largest.items() if elements >= logits} == {
        (0, "train"),
        (0, "evaluate"),
    }
    assert_fused(model)


def test_evaluation_between_the_steps_leaves_training_alone(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "compute_metrics": lambda _: {}}
    assert_fused(assert_same_training("gemma2", tmp_path, **options))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"bf16": True}, id="bf16"),
        pytest.param({"bf16_full_eval": True}, id="bf16_full_eval"),
        pytest.param({"eval_accumulation_steps": 1}, id="eval_accumulation_steps"),
        pytest.param({"batch_eval_metrics": True}, id="batch_eval_metrics"),
        pytest.param({"include_for_metrics": ["inputs", "loss"]}, id="include_for_metrics"),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_compute_metrics_gets_eagers_logits(
    model_type: str, options: dict[str, Any], tmp_path: Path
) -> None:
    seen: tuple[list[Any], list[Any]] = [], []
    for model, into in zip(eager_and_patched(model_type, layers=False), seen, strict=True):
        trainer = make_trainer(
            model,
            tmp_path,
            compute_metrics=lambda p, compute_result=True, into=into: (
                into.append(p.predictions) or {}
            ),
            **options,
        )
        trainer.evaluate()
    assert len(seen[1]) > 0
    for eager, ours in zip(*seen, strict=True):
        assert isinstance(ours, type(eager))
        assert np.array_equal(ours, eager)
    assert_fused(model)


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
def test_losses_outside_the_model_train_as_eager(options: dict[str, Any], tmp_path: Path) -> None:
    """And say so, once."""
    with pytest.warns(UserWarning, match=WITHOUT_LABELS) as said:
        model = assert_same_training("gemma2", tmp_path, gradient_accumulation_steps=2, **options)
    assert len([each for each in said if "liger_patch" in str(each.message)]) == 1
    assert "without labels" in (patch_status(model).reason or "")


def test_a_fused_loss_is_demanded_of_a_trainer_that_computes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "0")
    trainer = make_trainer(apply_patch(make_model()), tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(RuntimeError, match=r"apply_patch\(label_smoothing=...\)"):
        trainer.train()
