"""Weights of tokens in the loss of a call: ``model(..., labels=labels, loss_weights=weights)``.

``loss_weights[b, t]`` belongs to ``labels[b, t]``, or to ``shift_labels[b, t]`` where these are
given. B: rows, T: tokens of a row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

LOSS_WEIGHTS = "loss_weights"


def take_weights(arguments: dict[str, Any]) -> Tensor | None:
    """Remove the weights from the arguments of a call, and return them, (B, T); None without.

    Raises:
        ValueError: they are no floating-point tensor, or require a gradient.
    """
    weights = arguments.pop(LOSS_WEIGHTS, None)
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
