"""The gradients of a head, summed over chunks.

C: tokens of a chunk, N: of the batch, n: of them supervised, V: vocabulary, K: hidden size, or rank
of an adapter's product. Of large bf16 batches the chunks hold the unnormalized softmax ("odds", see
``triton/odds``) instead of dlogits: each row has a factor, and the label's gradient is apart. Of a
distributed vocabulary, the gradient of the states is summed over the ranks, chunk by chunk, while
the device computes the next products.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, serves_triton
from liger_patch.kernels.chunk_sizes import chunk_bounds
from liger_patch.kernels.head.inputs import HeadInputs, VocabShard, Wanted
from liger_patch.kernels.products import product_

SLAB_BYTES = 20 * 2**20  # of a float32 product at a time: 1024 rows of 4096 run at full speed


class OddsFactors(NamedTuple):
    """What turns the odds of some tokens into the gradient of their logits, (tokens,) each.

    The gradient is ``factors[:, None] * odds``. The odds of the labels are 0: there it is
    ``label_gradients``.
    """

    factors: Tensor  # float32
    labels: Tensor
    label_gradients: Tensor  # float32

    def of(self, tokens: slice) -> "OddsFactors":
        """Return the same of some of the tokens."""
        return OddsFactors(*(each[tokens] for each in self))


class Gradients:
    """The gradients of a head's inputs, summed over chunks.

    Memory is allocated when the first chunk is added, because by then the device has work to do.
    """

    def __init__(
        self,
        inputs: HeadInputs,
        operands: HeadInputs,  # the same in the dtype of the products
        rows: Tensor | None,  # (n,) the tokens of the chunks among the N; None: all
        wanted: Wanted,
        sum_dtype: torch.dtype,  # that dweight is summed in
        odds: OddsFactors | None,  # (n,) where the chunks are odds
        shard: VocabShard | None,  # of a distributed vocabulary
        totals: list[Tensor | None] | None = None,  # see run_chunks
    ) -> None:
        dstates, dweight, dbias, *of_adapter = totals or [None] * 5
        wide = accumulation_dtype(operands.hidden_states.dtype)
        self._inputs, self._wanted = inputs, wanted
        self._dbias = None if dbias is None else dbias.to(wide)
        self._products = [
            _Product(states, weight, x, rows, of_product, dtype, odds, shard, *before)
            for (states, weight), (x, _), of_product, dtype, before in zip(
                inputs.products(),
                operands.products(),
                wanted.of_products(),
                (sum_dtype, wide),  # an adapter's is small
                ((dstates, dweight), of_adapter),
                strict=False,  # there may be no adapter
            )
        ]

    def add(
        self,
        operands: HeadInputs,  # (C, K)
        dlogits: Tensor,  # (C, V), or odds
        chunk: slice,
    ) -> None:
        """Add a chunk; all in the dtype of the products."""
        for product, (x, weight) in zip(self._products, operands.products(), strict=True):
            product.add(x, weight, dlogits, chunk)
        if self._wanted.bias:
            # dlogits are no odds here: those are for heads without a bias
            summed = dlogits.sum(0, dtype=accumulation_dtype(dlogits.dtype))
            self._dbias = summed if self._dbias is None else self._dbias.add_(summed)

    def finish(self) -> list[Tensor | None]:
        """Return the gradients, None where not wanted, each in the dtype of its input; zero if no
        chunk was added.
        """
        sums = [total for product in self._products for total in product.finish()]
        sums.insert(2, self._dbias)
        sums += [None] * (len(self._wanted) - len(sums))
        finished = []
        for i, wanted in enumerate(self._wanted):
            value, total = self._inputs[i], sums[i]
            sums[i] = None  # freed as the next one is converted
            if not wanted or value is None:
                finished.append(None)
            else:
                finished.append(torch.zeros_like(value) if total is None else total.to(value.dtype))
        return finished


class _Product:
    """The gradients of ``states @ weight.T``."""

    def __init__(
        self,
        states: Tensor,  # (N, K)
        weight: Tensor,  # (V, K)
        x: Tensor,  # (N, K) states in the dtype of the products
        rows: Tensor | None,  # (n,)
        wanted: tuple[bool, bool],
        sum_dtype: torch.dtype,
        odds: OddsFactors | None,  # (n,)
        shard: VocabShard | None,
        dstates: Tensor | None,  # (N, K)
        dweight: Tensor | None,  # (V, K)
    ) -> None:
        self._states, self._weight, self._x = states, weight, x
        self._rows, self._wanted, self._sum_dtype, self._odds = rows, wanted, sum_dtype, odds
        self._dstates = dstates
        self._dweight = None if dweight is None else dweight.to(sum_dtype)
        self._shard, self._running = shard, None  # the last chunk's sum over the ranks

    def add(
        self,
        x: Tensor,  # (C, K)
        weight: Tensor,  # (V, K)
        dlogits: Tensor,  # (C, V), or odds
        chunk: slice,
    ) -> None:
        wants_states, wants_weight = self._wanted
        odds = None if self._odds is None else self._odds.of(chunk)
        if wants_states:
            if self._dstates is None:
                # ignored tokens have zero gradients
                make = torch.empty_like if self._rows is None else torch.zeros_like
                self._dstates = make(self._states, memory_format=torch.contiguous_format)
            if self._shard is not None:
                self._end_sum()  # over since the last product: here it frees its memory
                dtype = accumulation_dtype(x.dtype)  # rounded once, after the sum over the ranks
                partial = x.new_empty(len(x), weight.shape[1], dtype=dtype)
                _dstates_product(partial, None, odds, dlogits, weight)
                self._running = self._shard.start_sum_(partial), partial, chunk
            elif self._rows is None:
                _dstates_product(self._dstates[chunk], None, odds, dlogits, weight)
            else:
                _dstates_product(self._dstates, self._rows[chunk], odds, dlogits, weight)
        if wants_weight:
            is_first = self._dweight is None
            if self._dweight is None:
                self._dweight = x.new_empty(self._weight.shape, dtype=self._sum_dtype)
            if odds is not None:
                x = _scaled_rows(x, odds.factors)
            product_(self._dweight, dlogits.t(), x, add=not is_first)

    def finish(self) -> list[Tensor | None]:
        """Return the sums, and keep none of them."""
        self._end_sum()
        if self._dweight is not None and self._odds is not None:
            from liger_patch.kernels.triton.labels import add_label_rows_

            _, labels, label_gradients = self._odds
            add_label_rows_(self._dweight, self._x, self._rows, labels, label_gradients)
        sums = [self._dstates, self._dweight]
        self._dstates = self._dweight = None
        return sums

    def _end_sum(self) -> None:
        """Wait for the sum over the ranks, on the device, and take its chunk."""
        if self._running is None:
            return
        (work, total, chunk), self._running = self._running, None
        work.wait()
        assert self._dstates is not None
        if self._rows is None:
            self._dstates[chunk] = total
        else:
            self._dstates.index_copy_(0, self._rows[chunk], total.to(self._dstates.dtype))


def _dstates_product(
    out: Tensor,  # (C, K), or (N, K) with rows
    rows: Tensor | None,  # (C,) of out
    odds: OddsFactors | None,
    dlogits: Tensor,  # (C, V), or odds
    weight: Tensor,  # (V, K)
) -> None:
    """Compute ``out[rows] = dlogits @ weight``, rounded once where the device writes float32."""
    if odds is not None:
        from liger_patch.kernels.triton.scale import scale_rows

        slabs = chunk_bounds(len(dlogits), 4 * out.shape[1], SLAB_BYTES)
        wide = out.new_empty(slabs[0][1], out.shape[1], dtype=torch.float32)
        for start, stop in slabs:
            slab = slice(start, stop)
            product = product_(wide[: stop - start], dlogits[slab], weight)
            factors, labels, label_gradients = odds.of(slab)
            scale_rows(
                product,
                factors,
                out[slab] if rows is None else out,
                rows=None if rows is None else rows[slab],
                label_part=(labels, label_gradients, weight),
            )
    elif rows is None:
        product_(out, dlogits, weight)
    else:
        product = out.new_empty(len(dlogits), out.shape[1])
        out.index_copy_(0, rows, product_(product, dlogits, weight))


def _scaled_rows(x: Tensor, factors: Tensor) -> Tensor:
    """Return ``factors[:, None] * x`` (C, K) in the dtype of x."""
    from liger_patch.kernels.triton.scale import scale_rows

    return scale_rows(x, factors, torch.empty_like(x))


def scale_(values: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply contiguous values in place by a factor that only the device knows; 1 is no pass."""
    if values and serves_triton(*values):
        from liger_patch.kernels.triton import scale as scale_triton

        scale_triton.scale_(values, factor)
    elif factor.device.type != "cpu" or factor.item() != 1:
        for each in values:
            each.mul_(factor)
