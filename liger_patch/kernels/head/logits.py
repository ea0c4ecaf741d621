"""Losses from a chunk's logits: a kernel turns each row into its loss and, in place, into its
gradient. Statistics, logits of a vocabulary on several ranks, and PyTorch's operations, for devices
without Triton and for float64, take two walks: see ``row_sums``.

Heads and batches that odds serve are computed by ``odds.OddsForm`` on Hopper, ``odds.RowOddsForm``
on other GPUs; all others here, for instance gradients of entropy and lse. C: tokens of
a chunk, N: of the batch, n: of them supervised, V: vocabulary, V_r: its classes on this rank.
"""

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, serves_triton
from liger_patch.kernels.head.gradients import OddsFactors
from liger_patch.kernels.head.inputs import HeadInputs, VocabShard
from liger_patch.kernels.head.labels import CompactedLabels
from liger_patch.kernels.head.row_sums import (
    BASIC,
    OF_ENTROPY,
    OF_SMOOTHING,
    OF_STATISTICS,
    RowSums,
    TokenStatistics,
    UpstreamGradients,
    blocks_of_rows,
    gradients_of_log_probs,
    losses_and_gradients,
    row_gradients_,
    row_sums,
    write_statistics,
)
from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.products import product_


class LogitsForm:
    """Computes losses and gradients of chunks of tokens from their logits. ``odds.RowOddsForm`` and
    ``odds.OddsForm`` have the same interface.

    Attributes:
        counts_on_device: whether the kernels read on the device where the supervised tokens end.
            Then a chunk may run before the host knows their count, and losses without gradients
            take no (C, V) memory.
        losses: (N,) of the supervised tokens of the chunks so far; empty with upstream gradients.
        statistics: of the same tokens, None where not wanted.
        odds: what turns the odds in a chunk's memory into dlogits; None if it holds dlogits.
    """

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
        shard: VocabShard | None = None,  # this rank's part of a distributed vocabulary
    ) -> None:
        self._labels, self._options, self._upstream = labels.labels, options, upstream
        self._shard, self._own_weight = shard, options.class_weight
        rows = operands.weight.shape[0]
        self._vocab_size = rows if shard is None else shard.vocab_size
        if shard is not None and options.class_weight is not None:
            self._own_weight = options.class_weight[shard.start : shard.start + rows].contiguous()
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
        memory: Tensor | None,  # (C, V), or (C, V_r) of a shard; to be overwritten
        row_scale: Tensor | None,  # (N,), or (n,) once the count is read
    ) -> None:
        """Compute the losses of the C supervised tokens from ``start`` on.

        With ``row_scale``, memory then holds the gradient of the sum of ``row_scale * losses`` by
        the logits, or odds; with upstream gradients, the gradient for these.
        """
        assert memory is not None
        logits = logits_(memory, operands)
        chunk = slice(start, start + len(logits))
        scale = None if row_scale is None else row_scale[chunk]
        if self._shard is None and self._upstream is None and self.statistics is None:
            self._turn(logits, chunk, scale)
            return
        options, vocab_size, labels = self._options, self._vocab_size, self._labels[chunk]
        own_labels = labels if self._shard is None else labels - self._shard.start
        sums = self._sums(logits, own_labels)
        if self.statistics is not None:
            write_statistics(sums, vocab_size, self.statistics.of(chunk))
        if self._upstream is not None:
            gradients = gradients_of_log_probs(sums, options, self._upstream.of(chunk))
        elif self._shard is not None:
            self.losses[chunk], gradients = losses_and_gradients(
                sums, labels, options, vocab_size, scale
            )
        else:
            self._turn(logits, chunk, scale)
            return
        if gradients is not None:
            row_gradients_(logits, own_labels, options, self._own_weight, gradients)

    def _sums(self, logits: Tensor, own_labels: Tensor) -> RowSums:
        """Return the sums of whole rows (C,): with one gather of those of all ranks."""
        names = BASIC
        if self._options.label_smoothing > 0:
            names += OF_SMOOTHING
        if self.statistics is not None:
            names += OF_STATISTICS
        elif self._upstream is not None and self._upstream.entropy is not None:
            names += OF_ENTROPY
        sums = row_sums(logits, own_labels, self._options, self._own_weight, names)
        parts = sums[None] if self._shard is None else self._shard.gather(sums)
        return RowSums.of_parts(RowSums(**dict(zip(names, parts.unbind(1), strict=True))))

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
        from liger_patch.kernels.triton.cross_entropy import cross_entropy_rows as on_triton

        return on_triton(
            logits, labels, options, losses=losses, dlogits=dlogits, row_scale=row_scale
        )
    # PyTorch's operations: two walks. On a CPU one took 0.5 to 0.7 of their time (32,000 classes in
    # float32), a few percent of a step
    ignored, weight, names = labels == options.ignore_index, options.class_weight, BASIC
    labels = labels.masked_fill(ignored, 0)
    if options.label_smoothing > 0:
        names += OF_SMOOTHING
    if losses is None:
        losses = logits.new_empty(len(logits), dtype=accumulation_dtype(logits.dtype))
    for part in blocks_of_rows(logits):  # the second walk reads them from the cache
        sums = RowSums(*row_sums(logits[part], labels[part], options, weight, names))
        scale = None if row_scale is None else row_scale[part].to(losses.dtype)
        found = losses_and_gradients(sums, labels[part], options, logits.shape[1], scale)
        losses[part] = found[0].masked_fill(ignored[part], 0.0)
        if dlogits is not None and found[1] is not None:
            rows = dlogits[part]
            if dlogits is not logits:
                rows.copy_(logits[part])
            row_gradients_(rows, labels[part], options, weight, found[1])
            rows.masked_fill_(ignored[part, None], 0.0)
    return losses


def logits_(out: Tensor, operands: HeadInputs) -> Tensor:
    """Write the logits of the C tokens to ``out`` (C, V); all of one dtype."""
    (x, weight), *others = operands.products()
    if operands.bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(operands.bias, x, weight.t(), out=out)
    for x, weight in others:
        product_(out, x, weight.t(), add=True)
    return out
