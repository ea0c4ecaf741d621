"""Count the supervised labels of a call before the model runs.

The fused loss needs their number on the host. Without this, the host would wait at the loss until
the device has run the whole forward pass, and only then launch the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_patch.kernels.head.labels import compact_ahead
from liger_patch.patch.packing import IGNORE_INDEX, next_labels


class ExpectedLabels(NamedTuple):
    """What the loss of a call will be given, if the model does not change it.

    Attributes:
        labels: (B, T) ``labels`` of the call, or its ``shift_labels``.
        version: PyTorch's count of writes to these labels.
        ignore_index: that of the loss.
        shifted: whether they are ``shift_labels``: each token predicts the label in its own place.
        targets: (B T,) the label that each token predicts.
    """

    labels: Tensor
    version: int
    ignore_index: int
    shifted: bool
    targets: Tensor


def flat_targets(
    labels: Tensor,  # (B, T)
    ignore_index: int,
    *,
    shifted: bool,  # whether each token predicts the label in its own place
    expected: ExpectedLabels | None = None,
) -> Tensor:
    """Return (B T,), the label that each token predicts.

    These are the targets that were counted before the model ran, if nothing has changed the labels
    since; the operator finds the count by this very tensor.
    """
    if (
        expected is not None
        and labels is expected.labels
        and labels._version == expected.version
        and (ignore_index, shifted) == (expected.ignore_index, expected.shifted)
    ):
        return expected.targets
    return (labels if shifted else next_labels(labels, ignore_index)).reshape(-1)


def expected_labels(head: nn.Module | None, arguments: Mapping[str, Any]) -> ExpectedLabels | None:
    """Start to count the supervised labels among a call's arguments.

    None where the loss may be given something else than (B, T) integer labels, or where a later
    change of the labels would not be noticed.
    """
    shifted = arguments.get("shift_labels") is not None
    labels = arguments.get("shift_labels" if shifted else "labels")
    vocab_size = getattr(head, "out_features", None)
    ignore_index = arguments.get("ignore_index", IGNORE_INDEX)
    if type(labels) is not Tensor or labels.is_floating_point() or labels.is_complex():
        return None
    if labels.is_inference() or torch.is_inference_mode_enabled():
        return None  # tensors without a version: a change would not be noticed
    if labels.dim() != 2 or not isinstance(vocab_size, int) or not isinstance(ignore_index, int):
        return None
    targets = flat_targets(labels, ignore_index, shifted=shifted)
    compact_ahead(targets, vocab_size, ignore_index)
    return ExpectedLabels(labels, labels._version, ignore_index, shifted, targets)
