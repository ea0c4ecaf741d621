"""transformers.Trainer trains, evaluates, saves and resumes a patched model as an eager one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exactness import assert_no_worse
from slow_cases import slow_but
from tiny_models import Batch, tiny_batch, tiny_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from trainers import QUIET, LargestTensor
from training_step import Float64, Step, joined, tell_apart, widened

from liger_patch import apply_patch, patch_status, registry
from liger_patch.patch.forward import record_of
from liger_patch.patch.offload import CheckpointOffload

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

ROWS = {row.model_type: row for row in registry.available()}
MODEL_TYPES = ["llama", "gemma2", "qwen3_moe", "gemma3"]  # plain, softcap, auxiliary loss, vision
LENGTH = 9  # tokens of a sample
pytestmark = pytest.mark.usefixtures("imported_objects_are_not_collected")


def make_model(model_type: str = "llama") -> PreTrainedModel:
    model = tiny_model(ROWS[model_type])
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = True  # the auxiliary loss joins the loss
    return model


def make_samples(model: PreTrainedModel, count: int = 10) -> list[Batch]:
    """Samples with different numbers of supervised tokens."""
    batch = tiny_batch(model, batch=count, length=LENGTH)
    return [{name: value[i] for name, value in batch.items()} for i in range(count)]


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
    callbacks: list[TrainerCallback] | None = None,
    compute_metrics: Callable | None = None,
    compute_loss_func: Callable | None = None,
    preprocess_logits_for_metrics: Callable | None = None,
    **arguments: Any,
) -> Trainer:
    """Plain SGD without clipping: a loss that is scaled wrongly trains wrongly."""
    defaults = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "learning_rate": 0.05,
        "optim": "sgd",
        "max_grad_norm": 0.0,
        **QUIET,
    }
    samples = make_samples(model) if samples is None else samples
    return trainer_class(
        model=model,
        args=TrainingArguments(str(folder), **{**defaults, **arguments}),
        train_dataset=samples,
        eval_dataset=samples,
        callbacks=callbacks,
        compute_metrics=compute_metrics,
        compute_loss_func=compute_loss_func,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
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
    """Every loss and gradient, patched and eager in float64. Returns the patched model."""
    truth = train(widened(make_model(model_type)), folder, **options)
    model = apply_patch(widened(make_model(model_type)))
    truth, ours = tell_apart(truth, train(model, folder, **options))
    assert_no_worse(ours, truth, truth, torch.float32)
    return model


def assert_fused(model: PreTrainedModel) -> None:
    assert (patch_status(model).fused, patch_status(model).reason) == (True, None)


@pytest.mark.parametrize("gradient_accumulation_steps", slow_but([4], [1, 4]))
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_each_step_has_eagers_loss_and_gradients(
    model_type: str, gradient_accumulation_steps: int, tmp_path: Path
) -> None:
    # 5 batches an epoch: with 4 accumulated ones, every second step has one
    options = {"gradient_accumulation_steps": gradient_accumulation_steps}
    assert_fused(assert_same_training(model_type, tmp_path, **options))


@pytest.mark.parametrize(
    ("model_type", "gradient_accumulation_steps"),
    [
        ("llama", 4),
        pytest.param("llama", 1, marks=pytest.mark.slow),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in MODEL_TYPES[1:]),
    ],
)
@pytest.mark.parametrize("bf16", [False, True])
def test_training_is_no_worse_than_eager(
    model_type: str, gradient_accumulation_steps: int, bf16: bool, tmp_path: Path
) -> None:
    options = {"gradient_accumulation_steps": gradient_accumulation_steps, "learning_rate": 1e-3}
    truth = train(widened(make_model(model_type)), tmp_path, **options)
    eager = train(make_model(model_type), tmp_path, bf16=bf16, **options)
    model = apply_patch(make_model(model_type))
    ours = train(model, tmp_path, bf16=bf16, **options)
    assert_fused(model)
    truth, eager, ours = joined(truth, eager, ours)
    assert_no_worse(ours, eager, truth, torch.bfloat16 if bf16 else torch.float32)


@pytest.mark.parametrize("average_tokens_across_devices", slow_but([True], [False, True]))
@pytest.mark.parametrize("model_type", [*MODEL_TYPES, "qwen2_5_vl"])
def test_tokens_are_counted_as_for_the_eager_model(
    model_type: str, average_tokens_across_devices: bool, tmp_path: Path
) -> None:
    counts = []
    for patch in (False, True):
        model = make_model(model_type)
        if patch:
            apply_patch(model)
        trainer = make_trainer(
            model,
            tmp_path,
            gradient_accumulation_steps=4,
            average_tokens_across_devices=average_tokens_across_devices,
        )
        passed = []
        model.register_forward_pre_hook(
            lambda _, args, kwargs, passed=passed: passed.append(kwargs.get("num_items_in_batch")),
            with_kwargs=True,
        )
        trainer.train()
        counts.append((trainer.model_accepts_loss_kwargs, trainer.label_names, passed))
    assert counts[0] == counts[1]
    if model_type in ("llama", "gemma2", "qwen3_moe"):
        assert counts[1][0]
        assert len({int(count) for count in counts[1][2]}) > 1


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_training_and_loss_only_evaluation_hold_no_logits(
    model_type: str, bf16: bool, tmp_path: Path
) -> None:
    largest = {}
    for patch in (False, True):
        model = make_model(model_type)
        if patch:
            apply_patch(model)
        # wide batches: their logits are larger than any weight
        sizes = {"per_device_train_batch_size": 10, "per_device_eval_batch_size": 10}
        trainer = make_trainer(model, tmp_path, bf16=bf16, **sizes)
        for part in (trainer.train, trainer.evaluate):
            with LargestTensor() as seen:
                part()
            largest[patch, part.__name__] = seen.elements
    logits = 10 * LENGTH * model.config.vocab_size
    assert {name for name, elements in largest.items() if elements >= logits} == {
        (False, "train"),
        (False, "evaluate"),
    }
    assert_fused(model)


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
    seen = {}
    for patch in (False, True):
        model = make_model(model_type)
        if patch:
            apply_patch(model, layers=False)
        seen[patch] = []
        trainer = make_trainer(
            model,
            tmp_path,
            compute_metrics=lambda p, compute_result=True, into=seen[patch]: (
                into.append(p.predictions) or {}
            ),
            **options,
        )
        trainer.evaluate()
    assert len(seen[True]) == len(seen[False]) > 0
    for ours, eager in zip(seen[True], seen[False], strict=True):
        assert isinstance(ours, type(eager))
        assert np.array_equal(ours, eager)
    assert_fused(model)


@pytest.mark.parametrize("labels", [True, False])
def test_predict_gives_eagers_logits(labels: bool, tmp_path: Path) -> None:
    predictions = []
    for patch in (False, True):
        model = make_model("gemma2")
        samples = make_samples(model)
        if not labels:
            samples = [{k: v for k, v in sample.items() if k != "labels"} for sample in samples]
        if patch:
            apply_patch(model)
        predictions.append(make_trainer(model, tmp_path).predict(samples))
    eager, ours = predictions
    assert isinstance(ours.predictions, np.ndarray)
    assert np.array_equal(ours.predictions, eager.predictions)
    if labels:
        assert np.array_equal(ours.label_ids, eager.label_ids)
        assert ours.metrics["test_loss"] == pytest.approx(eager.metrics["test_loss"], rel=1e-6)


def test_preprocess_logits_for_metrics_gets_eagers_logits(tmp_path: Path) -> None:
    metrics = []
    for patch in (False, True):
        model = make_model("gemma2")
        if patch:
            apply_patch(model)
        trainer = make_trainer(
            model,
            tmp_path,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1) * (labels != 0),
            compute_metrics=lambda prediction: {"sum": int(prediction.predictions.sum())},
        )
        metrics.append(trainer.evaluate())
    assert metrics[1]["eval_sum"] == metrics[0]["eval_sum"] > 0


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


def log_softmax_of_logits(model, inputs):
    outputs = model(**inputs)
    labels = inputs["labels"][:, 1:]
    scores = outputs.logits[:, :-1].float().log_softmax(-1)
    scores = scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(scores * (labels != -100)).mean(), outputs


def models_loss_and_a_penalty_on_logits(model, inputs):
    outputs = model(**inputs)
    return outputs.loss + 0.1 * outputs.logits.float().logsumexp(-1).square().mean(), outputs


def models_loss_and_metrics(model, inputs):
    outputs = model(**inputs)
    with torch.no_grad():
        probabilities = outputs.logits.float().softmax(-1)
        assert torch.isfinite(torch.special.entr(probabilities).sum())
    return outputs.loss, outputs


@pytest.mark.parametrize(
    "loss_of",
    [
        cross_entropy_of_logits,
        cross_entropy_of_a_call_without_labels,
        log_softmax_of_logits,
        models_loss_and_a_penalty_on_logits,
        models_loss_and_metrics,
    ],
)
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
    assert_same_training(model_type, tmp_path, gradient_accumulation_steps=2, **options)


def test_evaluation_between_the_steps_leaves_training_alone(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "compute_metrics": lambda _: {}}
    assert_fused(assert_same_training("gemma2", tmp_path, **options))


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
@pytest.mark.parametrize("model_type", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_gradient_checkpointing_is_no_worse_than_eager(
    model_type: str, use_reentrant: bool, tmp_path: Path
) -> None:
    options = {"learning_rate": 1e-3}
    truth = train(widened(make_model(model_type)), tmp_path, **options)
    options |= checkpointing(use_reentrant)
    eager = train(make_model(model_type), tmp_path, **options)
    model = apply_patch(make_model(model_type))
    ours = train(model, tmp_path, **options)
    assert_fused(model)
    truth, eager, ours = joined(truth, eager, ours)
    assert_no_worse(ours, eager, truth, torch.float32)


def checkpointing(use_reentrant: bool) -> dict[str, Any]:
    # Transformers 5.23 has renamed both.
    renamed = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"
    return {name: True, f"{name}_kwargs": {"use_reentrant": use_reentrant}}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_offloaded_checkpoints_train_bitwise_as_plain_ones(
    use_reentrant: bool, tmp_path: Path
) -> None:
    """Trainer enables checkpointing after the patch, and evaluates in between."""
    options = {"learning_rate": 1e-3, **checkpointing(use_reentrant)}
    results = []
    for checkpoint_offload in (False, True):
        model = apply_patch(make_model(), checkpoint_offload=checkpoint_offload)
        record = record_of(model)
        assert record is not None
        if checkpoint_offload:
            record.offload = CheckpointOffload(device_types=("cpu",), min_bytes=1)
        results.append(train(model, tmp_path, **options))
    assert str(record.offload).startswith("1 layer inputs")
    plain, offloaded = results
    assert plain.keys() == offloaded.keys()
    assert all(torch.equal(offloaded[name], value) for name, value in plain.items())


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
    expected = whole.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_checkpoint_is_one_of_the_eager_model(tmp_path: Path) -> None:
    model = make_model("gemma2")
    eager_class = type(model)
    trainer = make_trainer(apply_patch(model), tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = eager_class.from_pretrained(tmp_path / "saved")
    assert type(loaded) is eager_class
    assert loaded.config.architectures == [eager_class.__name__]
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


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
    assert trainer.evaluate()["eval_loss"] == 0.0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class KeepsOutputs(Trainer):
    outputs: Any = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs["num_items_in_batch"] = num_items_in_batch
        self.outputs = model(**inputs)
        return (self.outputs.loss, self.outputs) if return_outputs else self.outputs.loss


class ReadsLogits(TrainerCallback):
    """Reads the last outputs' logits at one event."""

    def __init__(self, event: str) -> None:
        self.trainer: KeepsOutputs | None = None
        self.sums: list[float] = []
        setattr(self, event, self.read)

    def read(self, args, state, control, **kwargs) -> None:
        self.sums.append(self.trainer.outputs.logits.double().sum().item())


def read_in_callback(event: str, model: PreTrainedModel, folder: Path) -> list[float]:
    reader = ReadsLogits(event)
    trainer = make_trainer(
        model, folder, trainer_class=KeepsOutputs, callbacks=[reader], max_steps=1
    )
    reader.trainer = trainer
    trainer.train()
    return reader.sums


def test_a_callback_before_the_optimizer_step_reads_eagers_logits(tmp_path: Path) -> None:
    eager = read_in_callback("on_pre_optimizer_step", make_model(), tmp_path)
    ours = read_in_callback("on_pre_optimizer_step", apply_patch(make_model()), tmp_path)
    assert len(ours) == 1
    assert ours == eager


def test_a_callback_after_the_optimizer_step_is_told_how_to_read_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = read_in_callback("on_step_end", make_model(), tmp_path)
    with pytest.raises(RuntimeError, match="LIGER_PATCH_RETURN_LOGITS=1"):
        read_in_callback("on_step_end", apply_patch(make_model()), tmp_path)
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    ours = read_in_callback("on_step_end", apply_patch(make_model()), tmp_path)
    assert ours == eager
