"""How far the gradients of each contender are from float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from attempts import Failure, attempt
from contenders import eager, step
from heads import Head, batch
from peers import Loss
from torch import Tensor

# Not a power of two: there, eager's factor 1/N is exact, and its gradients better than elsewhere.
# A multiple of 8, because QuACK asks for one.
TOKENS = 2040
POWER_OF_TWO = 2048

MAX_RELATIVE_ERROR = 0.02  # by norm: bf16 rounding leaves about 0.003

Errors = list[float] | Failure  # of the hidden states' gradient and, unless frozen, the weight's


def gradient_errors(
    head: Head,
    losses: Mapping[str, Loss],
    *,
    tokens: int = TOKENS,
    device: torch.device | str = "cuda",
) -> dict[str, Errors]:
    """Relative errors, by norm, of each contender's gradients on a few tokens."""
    inputs = batch(replace(head, tokens=tokens), device=device, seed=1)
    _, *truth = step(eager(head), *(_widened(tensor) for tensor in inputs))

    def errors(loss: Loss) -> list[float]:
        _, *gradients = step(loss, *inputs)
        return [
            ((gradient.double() - true).norm() / true.norm()).item()
            for gradient, true in zip(gradients, truth, strict=True)
        ]

    return {name: attempt(lambda loss=loss: errors(loss)) for name, loss in losses.items()}


def is_right(errors: Errors, eager_errors: Errors) -> bool:
    """Whether each error is small, or no more than twice eager's, which the logits' peak sets."""
    if isinstance(errors, Failure):
        return False
    plain = eager_errors if isinstance(eager_errors, list) else [0.0] * len(errors)
    return all(
        error <= max(MAX_RELATIVE_ERROR, 2 * own) for error, own in zip(errors, plain, strict=True)
    )


def _widened(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)
