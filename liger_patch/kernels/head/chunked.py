"""The chunks of one call through a head: logits of a few tokens at a time, and what comes of them.

N: tokens, n: supervised tokens, H: hidden size, V: vocabulary, C: tokens in a chunk. Ignored tokens
are dropped. For each chunk, where gradients are wanted:

    logits = X_c W^T                 one matrix product into a buffer that every chunk reuses
    logits -> losses, G in place     G = dloss/dlogits; see ``heads`` for how
    dX_c = G W,  dW += G^T X_c       two products; the first chunk writes dW, later ones add to it

three matrix products of 2 n H V operations, two with a frozen head, one without gradients. A
low-rank adapter on the head adds its own thin products to each of them; a quantised weight is
dequantised a slice of classes at a time, for each product. Extra memory: the gradients themselves
and C * V logits. Rounding a 16-bit dW after each of many chunks would lose accuracy: see
``summed_chunk_bounds``. Chunking: Liger-Kernel (arXiv:2410.10989).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import serves_triton_device
from liger_patch.kernels.head.chunks import (
    chunk_bounds,
    chunks_of,
    rows_before_count,
    summed_chunk_bounds,
)
from liger_patch.kernels.head.gradients import Gradients
from liger_patch.kernels.head.inputs import HeadInputs, QuantizedWeight, Wanted
from liger_patch.kernels.head.labels import Supervised, Tokens
from liger_patch.kernels.head.logits import Head
from liger_patch.kernels.head.pytorch import accumulation_dtype

ALIGNED_V = 64  # elements: Triton's rows of logits start at 128-byte boundaries, whatever V


class Passed(NamedTuple):
    """What a pass gives.

    Attributes:
        head: that the tokens have gone through, with what it knows of each of them.
        supervised: the n tokens.
        gradients: in the order of the inputs, None where not wanted.
    """

    head: Head
    supervised: Supervised
    gradients: list[Tensor | None]


@dataclass(frozen=True)
class HeadPass:
    """What the passes of one call have in common.

    Attributes:
        tokens: of the call.
        dtype: of the matrix products and the logits.
        chunk_bytes: of logits held at once.
    """

    tokens: Tokens
    dtype: torch.dtype
    chunk_bytes: int

    def run(
        self,
        inputs: HeadInputs,
        make_head: Callable[[HeadInputs], Head],
        row_scale: Tensor,
        wanted: Wanted,
        supervised: Supervised | None = None,
    ) -> Passed:
        """Run the supervised tokens through the head, with the gradients of the sum of
        ``row_scale * losses``.

        Where the head counts on the device, the first chunk is launched before the count is read:
        until the host knows it, the device has work.

        Args:
            make_head: of the inputs in the dtype of the products.
            row_scale: (N,) in the order of the tokens; (n,) where they are counted.
            supervised: of an earlier pass.
        """
        factors = inputs.to(self.dtype)
        weight, vocab_size = inputs.weight, inputs.weight.shape[0]
        head = make_head(factors)
        takes_memory = any(wanted) or not head.counts_on_device
        scale = row_scale if any(wanted) else None

        def logits_memory(tokens: int) -> Tensor | None:
            if not takes_memory:
                return None
            rows = factors.hidden_states.new_empty(tokens, self._row_elements(vocab_size))
            if rows.device.type == "cpu":
                # oneDNN reads between the rows in bf16 with AMX: 0 * NaN is NaN (oneDNN#5717)
                rows[:, vocab_size:].zero_()
            return rows[:, :vocab_size]

        memory = early = None
        # in a second backward pass too, where n is known: the same chunks give the same bits
        first = self._rows_before_count(weight) if head.counts_on_device else 0
        if supervised is None and first:
            memory = logits_memory(first)
            early = factors.of(self.tokens.rows[:first])
            head.run(early, 0, memory=memory, row_scale=scale)
        if supervised is None:
            supervised = self.tokens.read()
        n, rows = len(supervised.labels), supervised.rows
        bounds, sum_dtype = self._bounds(n, weight, wanted, first=first)
        if memory is None and bounds:
            memory = logits_memory(bounds[0][1])
        odds = None if head.odds is None else head.odds.of(slice(n))
        gradients = Gradients(inputs, factors, rows, wanted, sum_dtype, odds)
        for start, stop in bounds:
            chunk = slice(start, stop)
            memory_c = None if memory is None else memory[: stop - start]
            if early is None:
                factors_c = factors.of(chunk if rows is None else rows[chunk])
                head.run(factors_c, start, memory=memory_c, row_scale=scale)
            else:
                factors_c, early = early.of(slice(stop)), None
            if memory_c is not None and any(wanted):
                gradients.add(factors_c, memory_c, chunk)
        memory = memory_c = factors_c = None  # freed before a float32 dweight is rounded
        return Passed(head, supervised, gradients.finish())

    def _rows_before_count(self, weight: Tensor | QuantizedWeight) -> int:
        """Of the first chunk, where it runs before the number of supervised tokens is read."""
        return rows_before_count(len(self.tokens.labels), self._row_bytes(weight), self.chunk_bytes)

    def _bounds(
        self, n: int, weight: Tensor | QuantizedWeight, wanted: Wanted, *, first: int
    ) -> tuple[list[tuple[int, int]], torch.dtype]:
        """(start, stop) of each chunk of n tokens, and the dtype that dweight is summed in.

        ``first``: the rows of a first chunk that does not wait for n; the others are like it.
        """
        if first:
            return chunks_of(first, n), weight.dtype
        row_bytes = self._row_bytes(weight)
        wide = accumulation_dtype(self.dtype)
        if (
            not (wanted.weight and isinstance(weight, Tensor))
            or weight.dtype.itemsize >= wide.itemsize
        ):
            return chunk_bounds(n, row_bytes, self.chunk_bytes), weight.dtype
        wide_bytes = weight.numel() * wide.itemsize
        bounds, widen = summed_chunk_bounds(n, row_bytes, self.chunk_bytes, wide_bytes)
        return bounds, wide if widen else weight.dtype

    def _row_bytes(self, weight: Tensor | QuantizedWeight) -> int:
        return self._row_elements(weight.shape[0]) * self.dtype.itemsize

    def _row_elements(self, vocab_size: int) -> int:
        """Elements from one row of logits to the next."""
        multiple = ALIGNED_V if serves_triton_device(self.tokens.labels) else 1
        return -(-vocab_size // multiple) * multiple
