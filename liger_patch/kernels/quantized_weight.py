"""What a kernel asks of a weight that is quantized. V: its rows, H: columns."""

from typing import Protocol

import torch
from torch import Tensor


class QuantizedWeight(Protocol):
    """A weight (V, H) without a gradient whose rows are dequantized where they are needed.

    Attributes:
        shape: (V, H).
        dtype, device: of the dequantized rows.
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
        """Return rows (stop - start, H), dequantized."""
        ...

    def is_current(self) -> bool:
        """Return True if the layer that it was read from still has the same numbers."""
        ...
