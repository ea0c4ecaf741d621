"""Samples with a weight for each token, and the truth: the eager model in float64, one sequence at
a time, each loss times its weight by hand.

A weight follows from its token, so that no test needs to know on which way it came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from packed_samples import IGNORED, Sample, make_samples, tensors
from torch import Tensor
from torch.nn.functional import cross_entropy
from training_step import Step, call, gradients
from transformers import PreTrainedModel


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
