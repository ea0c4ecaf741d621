"""What logits are a sum of: ``hidden_states @ weight.T + bias + low_rank @ low_rank_weight.T``.

N: tokens, H: hidden size, V: vocabulary, R: rank. The second product is that of a low-rank adapter
(LoRA) on the head, whatever came before it: ``low_rank`` is (scale times) what its first factor
gave, the columns of several adapters side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

SLICE_BYTES = 64 * 2**20  # of a quantised weight at a time: 128 MiB are no faster


class QuantizedWeight(Protocol):
    """A weight (V, H) without a gradient whose rows are dequantised where they are needed.

    Attributes:
        shape: (V, H).
        dtype, device: of the dequantised rows.
        stored: the tensor that holds the numbers, to tell whether they have changed.
        row_multiple: slices that begin at a multiple of so many rows are the cheapest.
        requires_grad: False.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stored: Tensor
    row_multiple: int
    requires_grad: bool

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows (stop - start, H), dequantised."""
        ...

    def is_current(self) -> bool:
        """Whether the layer that it was read from has not been given other numbers since."""
        ...


class HeadInputs(NamedTuple):
    """The inputs of a head, in the order of the gradients."""

    hidden_states: Tensor  # (N, H)
    weight: Tensor | QuantizedWeight  # (V, H)
    bias: Tensor | None = None  # (V,)
    low_rank: Tensor | None = None  # (N, R)
    low_rank_weight: Tensor | None = None  # (V, R)

    def products(self) -> list[tuple[Tensor, Tensor | QuantizedWeight]]:
        """(states, weight) of each product ``states @ weight.T``, the main one first."""
        products: list[tuple[Tensor, Tensor | QuantizedWeight]] = [
            (self.hidden_states, self.weight)
        ]
        if self.low_rank is not None and self.low_rank_weight is not None:
            products.append((self.low_rank, self.low_rank_weight))
        return products

    def to(self, dtype: torch.dtype) -> HeadInputs:
        """The factors of the products in their dtype; a quantised weight has it."""
        converted: list[Any] = [t.to(dtype) if isinstance(t, Tensor) else t for t in self]
        return HeadInputs(*converted)

    def of(self, rows: Tensor | slice) -> HeadInputs:
        """The same head for some of the tokens."""

        def chosen(states: Tensor) -> Tensor:
            return states[rows] if isinstance(rows, slice) else states.index_select(0, rows)

        low_rank = None if self.low_rank is None else chosen(self.low_rank)
        return self._replace(hidden_states=chosen(self.hidden_states), low_rank=low_rank)


class Wanted(NamedTuple):
    """Which gradients are wanted."""

    hidden_states: bool = False
    weight: bool = False
    bias: bool = False
    low_rank: bool = False
    low_rank_weight: bool = False

    @property
    def sums(self) -> bool:
        """Whether one of them sums over the tokens."""
        return self.weight or self.bias or self.low_rank_weight

    def of_products(self) -> list[tuple[bool, bool]]:
        """(states, weight) of each product."""
        return [(self.hidden_states, self.weight), (self.low_rank, self.low_rank_weight)]

    @classmethod
    def by(cls, inputs: HeadInputs) -> Wanted:
        """Those that PyTorch would compute."""
        needed: list[Any] = [t is not None and t.requires_grad for t in inputs]
        return cls(*(torch.is_grad_enabled() and each for each in needed))


def weight_slices(weight: Tensor | QuantizedWeight) -> Iterator[tuple[slice, Tensor]]:
    """(classes, their rows) of a weight: all at once, or as many as are dequantised at a time."""
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
