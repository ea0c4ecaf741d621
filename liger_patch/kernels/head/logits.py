"""Losses from a chunk's logits: a kernel turns each row into its loss and, in place, into its
gradient.

That is done where odds do not serve, neither those of Hopper (``hopper.OddsForm``) nor those of
other GPUs (``row_odds.RowOddsForm``): for gradients of entropy and lse, for instance. C: tokens of
a chunk, N: of the batch, n: of them supervised, V: vocabulary.
"""

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, serves_triton
from liger_patch.kernels.head import pytorch
from liger_patch.kernels.head.forms import OddsFactors
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.head.labels import CompactedLabels
from liger_patch.kernels.head.products import logits_
from liger_patch.kernels.head.statistics import (
    TokenStatistics,
    UpstreamGradients,
    log_probs_gradient_rows_,
    token_statistics_rows,
)
from liger_patch.kernels.options import LossOptions


class LogitsForm:
    """Computes losses and gradients of chunks of tokens from their logits: a ``forms.HeadForm``."""

    counts_on_device = False
    odds: OddsFactors | None = None

    def __init__(
        self,
        operands: HeadInputs,  # in the dtype of the products
        labels: CompactedLabels,
        options: LossOptions,
        *,
        has_statistics: bool = False,
        upstream: UpstreamGradients | None = None,  # (n,)
    ) -> None:
        self._labels, self._options, self._upstream = labels.labels, options, upstream
        x = operands.hidden_states
        dtype, count = accumulation_dtype(x.dtype), len(labels.labels)
        self.losses = x.new_empty(count if upstream is None else 0, dtype=dtype)
        self.statistics: TokenStatistics | None = None
        if has_statistics:
            entropy, lse, *others = x.new_empty(4, count, dtype=dtype)
            is_top1 = x.new_empty(count, dtype=torch.bool)
            self.statistics = TokenStatistics(entropy, lse, is_top1, *others)

    def run(
        self,
        operands: HeadInputs,  # of the C tokens
        start: int,
        *,
        memory: Tensor | None,  # (C, V), to be overwritten
        row_scale: Tensor | None,  # (N,), or (n,) once the count is read
    ) -> None:
        """Compute the losses and dlogits of C tokens: see ``HeadForm``."""
        assert memory is not None
        logits = logits_(memory, operands)
        chunk = slice(start, start + len(logits))
        labels = self._labels[chunk]
        if self._upstream is not None:
            upstream = UpstreamGradients(*(None if u is None else u[chunk] for u in self._upstream))
            log_probs_gradient_rows_(logits, labels, self._options, upstream)
            return
        if self.statistics is not None:
            token_statistics_rows(logits, labels, self._options, self.statistics.of(chunk))
        self._turn(logits, chunk, None if row_scale is None else row_scale[chunk])

    def _turn(self, logits: Tensor, chunk: slice, row_scale: Tensor | None) -> None:
        """Write losses of logits and, with ``row_scale`` (C,), turn these into gradients."""
        cross_entropy_rows(
            logits,
            self._labels[chunk],
            self._options,
            losses=self.losses[chunk],
            dlogits=None if row_scale is None else logits,
            row_scale=row_scale,
        )


def cross_entropy_rows(
    logits: Tensor,  # (C, V)
    labels: Tensor,  # (C,)
    options: LossOptions,
    *,
    losses: Tensor | None = None,  # (C,)
    dlogits: Tensor | None = None,  # (C, V)
    row_scale: Tensor | None = None,  # (C,)
) -> Tensor:
    """Return losses (C,) in ``accumulation_dtype``, 0 where ignored, by the kernel that serves the
    device: written to ``losses``, if given. With ``dlogits``, which may be ``logits`` itself, each
    row's gradient times its ``row_scale`` is written there.
    """
    if serves_triton(logits):
        from liger_patch.kernels.triton import cross_entropy as form
    else:
        form = pytorch
    return form.cross_entropy_rows(
        logits, labels, options, losses=losses, dlogits=dlogits, row_scale=row_scale
    )
