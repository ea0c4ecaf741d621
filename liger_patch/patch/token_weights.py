"""Weights of tokens in the loss of a call: ``model(..., labels=labels, loss_weights=weights)``.

``loss_weights[b, t]`` belongs to ``labels[b, t]``, or to ``shift_labels[b, t]`` where these are
given. B: rows, T: tokens of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from liger_patch.patch.packing import (
    IGNORE_INDEX,
    next_labels,
    sequence_starts,
    within_sequences,
)

LOSS_WEIGHTS = "loss_weights"  # an argument of ours, and a column of data sets
WEIGHT_BITS = "loss_weight_bits"  # their bits as int32: mixed precision rounds floating-point ones


def take_weights(arguments: dict[str, Any]) -> Tensor | None:
    """Remove the weights from the arguments of a call, and return them, (B, T); None without.

    Raises:
        ValueError: they are no floating-point tensor, or require a gradient.
    """
    weights, bits = arguments.pop(LOSS_WEIGHTS, None), arguments.pop(WEIGHT_BITS, None)
    if bits is not None:
        return bits.view(torch.float32)
    if weights is None:
        return None
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        kind = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"{LOSS_WEIGHTS} must be a floating-point tensor (B, T), got {kind}")
    if weights.requires_grad:
        raise ValueError(f"{LOSS_WEIGHTS} must not require a gradient: none is computed for them")
    return weights


def weights_of_targets(
    weights: Tensor,  # (B, T)
    labels: Tensor,  # (B, T), or what is predicted
    *,
    shifted: bool,  # whether they are what is predicted
) -> Tensor:
    """Return (B, T), the weight of what each token predicts.

    Raises:
        ValueError: weights of another shape than the labels.
    """
    if weights.shape != labels.shape:
        raise ValueError(
            f"{LOSS_WEIGHTS} must have the shape of the labels {tuple(labels.shape)}, "
            f"got {tuple(weights.shape)}"
        )
    return weights if shifted else pad(weights[..., 1:], (0, 1))


def sum_of_weights(batch: Mapping[str, Any]) -> Tensor:
    """Return () float64, the sum of the weights of a batch's supervised tokens."""
    labels, targets = batch["labels"], batch.get("shift_labels")
    is_shifted = targets is not None
    if targets is None:
        starts = sequence_starts(labels.shape, batch)
        targets = next_labels(within_sequences(labels, starts, IGNORE_INDEX), IGNORE_INDEX)
    weights = batch[WEIGHT_BITS].view(torch.float32)
    weights = weights_of_targets(weights, targets, shifted=is_shifted)
    weights = weights.masked_fill(targets == IGNORE_INDEX, 0.0)
    if weights.device.type == "mps":  # which has no float64
        weights = weights.cpu()
    return weights.sum(dtype=torch.float64)
