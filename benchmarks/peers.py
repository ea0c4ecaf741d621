"""Other people's losses of a head, where their packages are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from heads import Head
from torch import Tensor

# hidden states (N, H), weight (V, H), labels (N,) -> ()
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def peers(head: Head) -> dict[str, Loss]:
    """Name to loss. Cut Cross-Entropy without its gradient filter, which is not exact."""
    found: dict[str, Loss] = {}
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(softcap=head.softcap)
        found["Liger-Kernel"] = lambda hidden, weight, labels: liger(weight, hidden, labels)
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy as cce

        found["CCE, unfiltered"] = lambda hidden, weight, labels: cce(
            hidden, weight, labels, softcap=head.softcap, filter_eps=None
        )
    return found
