"""Labels of a call, counted before the model runs: the fused loss needs their number on the host,
which would else wait there until the device has come as far, and queue the backward pass only then.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from liger_patch.kernels.head.labels import compact_ahead
from liger_patch.patch.packing import next_labels


@dataclass(frozen=True)
class ExpectedLabels:
    """What the loss of a call will be given, if the model does not change it.

    Attributes:
        labels: (B, T) ``labels`` of the call, or its ``shift_labels``.
        version: of their values.
        ignore_index: of the loss.
        shifted: whether they are what is predicted.
        targets: (B T,) what is predicted.
    """

    labels: Tensor
    version: int
    ignore_index: int
    shifted: bool
    targets: Tensor

    @classmethod
    def counted(
        cls, labels: Tensor, ignore_index: int, vocab_size: int, *, shifted: bool
    ) -> ExpectedLabels:
        """Start to count those that are supervised."""
        targets = (labels if shifted else next_labels(labels, ignore_index)).reshape(-1)
        compact_ahead(targets, vocab_size, ignore_index)
        return cls(labels, labels._version, ignore_index, shifted, targets)

    def targets_of(self, labels: Tensor, ignore_index: int, *, shifted: bool) -> Tensor | None:
        """Return what the labels that the loss is given predict, None where they are others."""
        if labels is not self.labels or labels._version != self.version:
            return None
        same = (ignore_index, shifted) == (self.ignore_index, self.shifted)
        return self.targets if same else None
