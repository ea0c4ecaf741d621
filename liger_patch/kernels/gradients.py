"""The gradients of a head, chunk by chunk. C: tokens of a chunk, N: of the batch, H: hidden size,
V: vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.chunks import chunk_bounds
from liger_patch.kernels.cross_entropy_pytorch import accumulation_dtype
from liger_patch.kernels.products import product_

SLAB_BYTES = 20 * 2**20  # of a float32 product at a time: 1024 rows of 4096 run at full speed


class Wanted(NamedTuple):
    """Which gradients are wanted."""

    hidden_states: bool
    weight: bool
    bias: bool


class OddsFactors(NamedTuple):
    """What makes odds the gradient of the logits: ``factors[:, None] * odds``, and at the labels,
    where odds are 0, ``label_gradients``. Each of as many tokens as the odds.
    """

    factors: Tensor  # float32
    labels: Tensor
    label_gradients: Tensor  # float32

    def of(self, tokens: slice) -> "OddsFactors":
        return OddsFactors(*(each[tokens] for each in self))


class Gradients:
    """Sums over chunks of dlogits. The memory is taken when the first chunk comes: the device has
    work by then.
    """

    def __init__(
        self,
        inputs: tuple[Tensor, Tensor, Tensor | None],  # (N, H), (V, H), (V,)
        x: Tensor,  # (N, H) hidden states in the dtype of the products
        rows: Tensor | None,  # (n,) the tokens of the chunks among the N; None: all
        wanted: Wanted,
        sum_dtype: torch.dtype,  # that dweight is summed in
        odds: OddsFactors | None,  # (n,) where the chunks are odds
    ) -> None:
        self._inputs, self._x, self._odds = inputs, x, odds
        self._rows, self._wanted, self._sum_dtype = rows, wanted, sum_dtype
        self._dhidden = self._dweight = self._dbias = None

    def add(
        self,
        x: Tensor,  # (C, H)
        weight: Tensor,  # (V, H)
        dlogits: Tensor,  # (C, V), or odds
        chunk: slice,
    ) -> None:
        """Add a chunk; x, weight and dlogits are in the dtype of the products."""
        hidden_states, its_weight, _ = self._inputs
        odds = None if self._odds is None else self._odds.of(chunk)
        if self._wanted.hidden_states:
            if self._dhidden is None:
                # ignored tokens have zero gradients
                make = torch.empty_like if self._rows is None else torch.zeros_like
                self._dhidden = make(hidden_states, memory_format=torch.contiguous_format)
            if self._rows is None:
                _dhidden_product(self._dhidden[chunk], None, odds, dlogits, weight)
            else:
                _dhidden_product(self._dhidden, self._rows[chunk], odds, dlogits, weight)
        if self._wanted.weight:
            is_first = self._dweight is None
            if self._dweight is None:
                self._dweight = its_weight.new_empty(its_weight.shape, dtype=self._sum_dtype)
            if odds is not None:
                x = _scaled_rows(x, odds.factors)
            product_(self._dweight, dlogits.t(), x, add=not is_first)
        if self._wanted.bias:
            # never odds: they are for heads without a bias
            summed = dlogits.sum(0, dtype=accumulation_dtype(dlogits.dtype))
            self._dbias = summed if self._dbias is None else self._dbias.add_(summed)

    def finish(self) -> list[Tensor | None]:
        """The gradients, None where not wanted, each in the dtype of its input; zero if no chunk
        was added.
        """
        if self._dweight is not None and self._odds is not None:
            from liger_patch.kernels.label_rows_triton import add_label_rows_

            _, labels, label_gradients = self._odds
            add_label_rows_(self._dweight, self._x, self._rows, labels, label_gradients)
        sums = self._dhidden, self._dweight, self._dbias
        self._dhidden = self._dweight = self._dbias = None
        finished = []
        for value, total, wanted in zip(self._inputs, sums, self._wanted, strict=True):
            if value is None or not wanted:
                finished.append(None)
            else:
                finished.append(torch.zeros_like(value) if total is None else total.to(value.dtype))
        return finished


def _dhidden_product(
    out: Tensor,  # (C, H), or (N, H) with rows
    rows: Tensor | None,  # (C,) of out
    odds: OddsFactors | None,
    dlogits: Tensor,  # (C, V), or odds
    weight: Tensor,  # (V, H)
) -> None:
    """``out[rows] = dlogits @ weight``, rounded once where the device writes float32 products."""
    if odds is not None:
        from liger_patch.kernels.scale_triton import scale_rows

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
        out.index_copy_(0, rows, torch.mm(dlogits, weight).to(out.dtype))


def _scaled_rows(x: Tensor, factors: Tensor) -> Tensor:
    """``factors[:, None] * x`` (C, H) in the dtype of x."""
    from liger_patch.kernels.scale_triton import scale_rows

    return scale_rows(x, factors, torch.empty_like(x))
