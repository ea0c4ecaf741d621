"""Weights of tokens in the loss of a call: ``model(..., labels=labels, loss_weights=weights)``.

``loss_weights[b, t]`` belongs to ``labels[b, t]`` of the call, or to its ``shift_labels[b, t]``
where these are given. B: rows, T: tokens of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from liger_patch.patch.packing import next_labels

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


class LabelWeights(NamedTuple):
    """The weights of a call.

    Attributes:
        weights: (B, T).
        labels: (B, T) ``labels`` of the call, or its ``shift_labels``.
        shifted: whether they are ``shift_labels``.
    """

    weights: Tensor
    labels: Tensor
    shifted: bool

    def of_targets(self, given: Tensor, ignore_index: int, *, shifted: bool) -> Tensor:
        """Return (B, T), the weight of what each token predicts.

        Args:
            given: (B, T) labels that the model gives to its loss, or its ``shift_labels``.
            ignore_index: that of the loss.
            shifted: whether they are ``shift_labels``. A model may make them of labels.

        Raises:
            ValueError: weights of another shape than the labels, or labels that the model has moved
                to other places.
        """
        weights, labels, _ = self
        if weights.shape != labels.shape:
            raise ValueError(
                f"{LOSS_WEIGHTS} must have the shape of the labels {tuple(labels.shape)}, "
                f"got {tuple(weights.shape)}"
            )
        ways = [(weights, labels)]
        if not self.shifted:  # first: labels in their own places are never taken for the next ones
            ways.insert(0, (pad(weights[..., 1:], (0, 1)), next_labels(labels, ignore_index)))
        if given is labels and shifted == self.shifted:  # the host need not read them
            return ways[0][0]
        targets = given if shifted else next_labels(given, ignore_index)
        for weights_there, labels_there in ways:
            is_there = targets == labels_there.to(targets.device)
            if (is_there | (targets == ignore_index)).all():  # a model may leave out some
                return weights_there
        raise ValueError(
            f"{LOSS_WEIGHTS} cannot follow labels that the model's own code moves to other places"
        )
