"""Samples with a weight for each token, and the truth: the eager model in float64, one sequence at
a time, each loss times its weight by hand.

A weight follows from its token, so that no test needs to know on which way it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from packed_samples import IGNORED, Sample, make_samples, tensors
from torch import Tensor
from torch.nn.functional import cross_entropy
from training_step import Step, call, gradients
from transformers import PreTrainedModel

LENGTHS = (9, 4, 13, 6, 5, 7, 3, 11)
LEARNING_RATE = 0.1


def weights_of(ids: Sequence[int]) -> list[float]:
    """Some are 0; all are sums of few powers of 2, which float32 holds."""
    return [(each * 5 % 8) / 4 for each in ids]


def weighted_samples(*lengths: int, **options: Any) -> list[Any]:
    samples: list[Any] = make_samples(*lengths, **options)
    return [{**each, "loss_weights": weights_of(each["input_ids"])} for each in samples]


def truth_of(model: PreTrainedModel, samples: Sequence[Sample]) -> Step:
    """The weighted mean over all supervised tokens of these sequences, and its gradients."""
    total, denominator = torch.zeros((), dtype=torch.float64), 0.0
    for sample in samples:
        logits: Tensor = call(model, {"input_ids": tensors(sample)["input_ids"]}).logits[0]
        labels = torch.tensor(sample["labels"][1:], dtype=torch.int64)
        weights = torch.tensor(weights_of(sample["input_ids"])[1:], dtype=torch.float64)
        losses = cross_entropy(logits[:-1], labels, ignore_index=IGNORED, reduction="none")
        total = total + (weights * losses).sum()
        denominator += weights[labels != IGNORED].sum().item()
    loss = total / denominator
    return {"loss": loss.detach(), **gradients(model, loss)}


def trained_by_hand(model: PreTrainedModel, steps: Sequence[Sequence[Sample]]) -> Step:
    """The weights of a model after steps of plain SGD, each on these sequences."""
    for samples in steps:
        slopes = truth_of(model, samples)
        with torch.no_grad():
            for name, values in model.named_parameters():
                values -= LEARNING_RATE * slopes[name]
    return {name: values.detach().clone() for name, values in model.named_parameters()}


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Of a training by plain SGD: a loss that is scaled trains otherwise."""
    return {
        "output_dir": str(folder),
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        **changes,
    }


def in_order(trainer: Any) -> Any:
    """The trainer, which takes its samples from the first to the last."""
    sampler = torch.utils.data.SequentialSampler(trainer.train_dataset)
    trainer._get_train_sampler = lambda *_: sampler
    return trainer
