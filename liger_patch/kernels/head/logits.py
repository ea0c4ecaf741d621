"""A chunk's logits, materialized: how many tokens fit into memory, the products that write their
logits, and the kernel that turns each row into its loss and, in place, into its gradient.

``LogitsForm`` computes losses from logits where odds do not serve, neither those of Hopper
(``hopper.OddsForm``) nor those of other GPUs (``row_odds.RowOddsForm``): for gradients of entropy
and lse, for instance. C: tokens of a chunk, N: of the batch, n: of them supervised, V: vocabulary.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, serves_triton
from liger_patch.kernels.head import pytorch
from liger_patch.kernels.head.inputs import HeadInputs, QuantizedWeight
from liger_patch.kernels.head.labels import CompactedLabels
from liger_patch.kernels.head.statistics import (
    TokenStatistics,
    UpstreamGradients,
    log_probs_gradient_rows_,
    token_statistics_rows,
)
from liger_patch.kernels.options import LossOptions

SLICE_BYTES = 64 * 2**20  # of a quantized weight at a time: 128 MiB are no faster
SLABS = 16  # of rows, where the device cannot write a wider result itself: bounds the copy
ROW_MULTIPLE = 128  # the row tile of the matrix products on tensor cores
NARROW_CHUNKS = 16  # with more, a sum rounded to 16 bits after each chunk exceeds eager's error


class OddsFactors(NamedTuple):
    """What turns the odds of some tokens into the gradient of their logits, (tokens,) each.

    The gradient is ``factors[:, None] * odds``. The odds of the labels are 0: there it is
    ``label_gradients``, unless the label is outside [0, V_r), in another shard of the vocabulary.
    """

    factors: Tensor  # float32
    labels: Tensor
    label_gradients: Tensor  # float32

    def of(self, tokens: slice) -> "OddsFactors":
        """Return the same of some of the tokens."""
        return OddsFactors(*(each[tokens] for each in self))


class LogitsForm:
    """Computes losses and gradients of chunks of tokens from their logits.

    Attributes:
        counts_on_device: whether the kernels read on the device where the supervised tokens end.
            Then a chunk may run before the host knows their count, and losses without gradients
            take no (C, V) memory.
        losses: (N,) of the supervised tokens of the chunks so far; empty with upstream gradients.
        statistics: of the same tokens, None where not wanted.
        odds: None here, where the memory of a chunk holds dlogits. ``OddsForm`` and
            ``RowOddsForm``: the factors that turn odds into dlogits.
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
        """Compute the losses of the C supervised tokens from ``start`` on.

        With ``row_scale``, memory then holds the gradient by the logits of the sum of
        ``row_scale * losses``; with upstream gradients, theirs.
        """
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


def logits_(out: Tensor, operands: HeadInputs) -> Tensor:
    """Write the logits of the C tokens to ``out`` (C, V); all of one dtype."""
    (x, weight), *others = operands.products()
    for classes, part in weight_slices(weight):
        if operands.bias is None:
            torch.mm(x, part.t(), out=out[:, classes])
        else:
            torch.addmm(operands.bias[classes], x, part.t(), out=out[:, classes])
        del part  # before the next one is dequantized
    for x, weight in others:
        for classes, part in weight_slices(weight):
            product_(out[:, classes], x, part.t(), add=True)
    return out


def product_(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False, alpha: float = 1.0) -> Tensor:
    """Compute ``out = alpha a @ b`` or ``out += alpha a @ b``, also into a wider dtype, as float32
    from bf16: one call and one rounding where the device can.
    """
    if not a.numel():  # of a shard without rows
        return out if add else out.zero_()
    beta, is_plain = (1.0 if add else 0.0), not add and alpha == 1.0
    if out.dtype == a.dtype:
        if is_plain:
            return torch.mm(a, b, out=out)
        return torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    if writes_float32(a) and out.dtype == torch.float32:
        if is_plain:
            return torch.mm(a, b, out_dtype=out.dtype, out=out)
        return torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)
    step = max(1, -(-out.shape[0] // SLABS))
    for start in range(0, out.shape[0], step):
        part, rows = out[start : start + step], a[start : start + step]
        slab = product_(rows.new_empty(part.shape), rows, b, alpha=alpha)
        part.add_(slab) if add else part.copy_(slab)
    return out


def writes_float32(a: Tensor) -> bool:
    """Return True if a product of such operands can be written in float32, unrounded."""
    # torch.mm(..., out_dtype=torch.float32) came with torch 2.8, for CUDA devices only
    return a.is_cuda and torch.version.hip is None and hasattr(torch.ops.aten.mm, "dtype_out")


def weight_slices(weight: Tensor | QuantizedWeight) -> Iterator[tuple[slice, Tensor]]:
    """Yield (classes, their rows): a plain weight at once, a quantized one in parts."""
    if isinstance(weight, Tensor):
        yield slice(0, weight.shape[0]), weight
        return
    vocab_size, hidden_size = weight.shape
    rows = SLICE_BYTES // (hidden_size * weight.dtype.itemsize)
    rows = max(1, rows // weight.row_multiple) * weight.row_multiple
    for start in range(0, vocab_size, rows):
        stop = min(start + rows, vocab_size)
        part = weight.rows(start, stop)
        yield slice(start, stop), part
        del part  # before the next, as its readers must


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


def chunk_rows(tokens: int, row_bytes: int, budget_bytes: int) -> int:
    """Return the rows of each chunk of ``tokens`` rows of ``row_bytes`` within a budget; the last
    chunk has what is left.

    As few chunks as fit, of equal size, at least a row each; sizes are multiples of ROW_MULTIPLE
    where the budget holds that many rows.
    """
    most = max(1, budget_bytes // row_bytes)
    if most >= tokens:
        return tokens
    multiple = ROW_MULTIPLE if most >= ROW_MULTIPLE else 1
    most -= most % multiple
    count = -(-tokens // most)
    size = -(-tokens // count)
    return -(-size // multiple) * multiple


def chunk_bounds(tokens: int, row_bytes: int, budget_bytes: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each chunk of ``chunk_rows``."""
    return chunks_of(chunk_rows(tokens, row_bytes, budget_bytes), tokens)


def chunks_of(size: int, tokens: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each chunk of ``size`` rows, the last with what is left."""
    return [(start, min(start + size, tokens)) for start in range(0, tokens, max(1, size))]


def rows_before_count(tokens: int, row_bytes: int, budget_bytes: int) -> int:
    """Return the rows of a first chunk that runs before the count of supervised tokens is read; 0
    where no chunk runs before that.

    That is so with many chunks: there the wait for the count is short, and the size of the chunks
    depends on the count (``summed_chunk_rows``).
    """
    rows = chunk_rows(tokens, row_bytes, budget_bytes)
    return rows if tokens <= rows * NARROW_CHUNKS else 0


def summed_chunk_rows(
    tokens: int, row_bytes: int, budget_bytes: int, wide_bytes: int
) -> tuple[int, bool]:
    """Return ``chunk_rows`` for a sum over the chunks that is kept in 16 bits, and whether to widen
    it.

    Beyond NARROW_CHUNKS chunks, rounding the sum after each would cost accuracy. Then either the
    chunks are larger than the budget, or the sum is kept in ``wide_bytes`` more: whichever needs
    less memory.
    """
    within_budget = chunk_rows(tokens, row_bytes, budget_bytes)
    if tokens <= within_budget * NARROW_CHUNKS:
        return within_budget, False
    rows = -(-tokens // NARROW_CHUNKS)
    if rows > ROW_MULTIPLE:
        rows = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    if rows * row_bytes - budget_bytes > wide_bytes:
        return within_budget, True
    return chunk_rows(tokens, row_bytes, rows * row_bytes), False


def summed_chunk_bounds(
    tokens: int, row_bytes: int, budget_bytes: int, wide_bytes: int
) -> tuple[list[tuple[int, int]], bool]:
    """Return (start, stop) of each chunk of ``summed_chunk_rows``, and whether to widen the sum."""
    rows, widens = summed_chunk_rows(tokens, row_bytes, budget_bytes, wide_bytes)
    return chunks_of(rows, tokens), widens
