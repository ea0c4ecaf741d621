"""Runs of Trainer on tiny models, and every loss and gradient of them.

Where accelerate is not installed, importing this skips the test file that imports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ROWS, Batch, tiny_batch, tiny_model
from trainers import QUIET
from training_step import Float64, Step, assert_same_step, widened

from liger_patch import apply_patch

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

MODEL_TYPES = ["llama", "gemma2", "qwen3_moe", "gemma3"]  # plain, softcap, auxiliary loss, vision
LENGTH = 9  # tokens of a sample


def make_model(model_type: str = "llama") -> PreTrainedModel:
    """Return a tiny model; of a mixture of experts, one with its auxiliary loss."""
    model = tiny_model(ROWS[model_type])
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = True
    return model


def eager_and_patched(model_type: str = "llama", **options: Any) -> tuple[Any, Any]:
    return make_model(model_type), apply_patch(make_model(model_type), **options)


def make_samples(model: PreTrainedModel, count: int = 10) -> list[Batch]:
    """Return samples with different numbers of supervised tokens."""
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
    **arguments: Any,
) -> Trainer:
    """Return one with plain SGD without clipping: a loss that is scaled wrongly trains wrongly."""
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
    )


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train(model: PreTrainedModel, folder: Path, **options: Any) -> Step:
    """Return the loss of each step and each gradient before each optimizer step."""
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
