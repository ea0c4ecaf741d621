"""Run a layer over slices of its tokens, and keep nothing but its input.

For long rows under gradient checkpointing. Checkpointing computes one decoder layer at a time
again, and what its feed-forward layer then keeps is most of the memory. Two functions share the
work:

    x -> link      keeps x, and computes every gradient, slice by slice
    link, x -> y   keeps nothing; the gradient of link is that of y

``link`` has the shape of y and no memory: it only leads the gradient of y to the first function.
Non-reentrant checkpointing computes again only up to the last tensor that is kept. That is x, so it
computes no product. The backward pass computes again what it needs, once. So there are as many
matrix products as with ordinary checkpointing. The exception: if something behind the layer keeps
its own input (the norm that Gemma puts there), y is computed once more.

N: tokens, H: features of x, O: of y, n: tokens of a slice. Extra memory, in bytes in 16 bits:
forward y, 2 N O; backward dx, 2 N H; in both what a slice takes, and the weights as products take
them, where they are cast or quantized: once for all slices. Gradients of parameters are summed over
the slices in float32, and rounded once.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    LAYER_ADVICE,
    accumulation_dtype,
    check_backward,
    without_autocast,
)
from liger_patch.kernels.chunk_sizes import chunk_rows, chunks_of
from liger_patch.kernels.product import product_
from liger_patch.kernels.rows import rows_of

# What a whole feed-forward layer may take before it is sliced: 15k tokens with I = 14336. Less than
# that is not what fills a GPU beside the checkpoints.
LONG_BYTES = 2 * 2**30
SLICE_BYTES = 512 * 2**20  # of one slice: 3744 tokens with I = 14336, which fill a GPU
GATED_TENSORS = 5  # of the intermediate size in a backward pass: gate, up, their gradients, da


class Sums:
    """Sums over slices of the gradients of parameters.

    Args:
        parameters: None for one that does not exist.
        wanted: whose gradients are summed.
    """

    def __init__(self, parameters: Sequence[Tensor | None], wanted: Sequence[bool]) -> None:
        self._parameters = parameters
        self._wanted = wanted
        self._sums: list[Tensor | None] = [None] * len(parameters)

    def wants(self, i: int) -> bool:
        """Return whether the gradient of a parameter is summed."""
        return self._parameters[i] is not None and self._wanted[i]

    def add_product(self, i: int, a: Tensor, b: Tensor) -> None:
        """Add ``a @ b`` to the gradient of a matrix, if it is wanted."""
        total, parameter = self._sums[i], self._parameters[i]
        if parameter is None or not self._wanted[i]:
            return
        if total is None:
            self._sums[i] = product_(_sum_of(parameter, torch.empty), a, b)
        else:
            product_(total, a, b, add=True)

    def add(self, i: int, gradient: Tensor | None) -> None:
        """Add to the gradient of a parameter, if it is wanted."""
        parameter = self._parameters[i]
        if parameter is None or gradient is None or not self._wanted[i]:
            return
        total = self._sums[i]
        if total is None:
            total = self._sums[i] = _sum_of(parameter, torch.zeros)
        total += gradient

    def finish(self) -> list[Tensor | None]:
        """Return the gradients, each of its parameter's dtype; None where one is not wanted."""
        found: list[Tensor | None] = []
        for i, parameter in enumerate(self._parameters):
            total, self._sums[i] = self._sums[i], None  # freed as the next one is rounded
            if parameter is None or not self._wanted[i]:
                found.append(None)
            else:
                total = _sum_of(parameter, torch.zeros) if total is None else total
                found.append(total.to(parameter.dtype))
        return found


def _sum_of(parameter: Tensor, make: Any) -> Tensor:
    dtype = accumulation_dtype(parameter.dtype)
    return make(parameter.shape, dtype=dtype, device=parameter.device)


class SlicedLayer(Protocol):
    """A layer as this module runs it. It holds no tensor that autograd must know.

    Attributes:
        name: of the public function, for errors.
        dtype: of the products.
        out_features: O.
    """

    name: str
    dtype: torch.dtype
    out_features: int

    def prepare(self, parameters: Sequence[Tensor | None]) -> Any:
        """Return what all slices share: the weights as products take them."""
        ...

    def forward(self, shared: Any, x: Tensor, i: int) -> Tensor:
        """Return y (n, O) of slice i, x (n, H)."""
        ...

    def backward(
        self, shared: Any, x: Tensor, dy: Tensor, dx: Tensor | None, sums: Sums, i: int
    ) -> None:
        """Write dx (n, H) of slice i, if it is wanted, and add to the sums."""
        ...


class _Keep(torch.autograd.Function):
    """x to link."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # (..., H)
        layer: SlicedLayer,
        slices: list[tuple[int, int]],
        *parameters: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.slices, ctx.dtype, ctx.shape = layer, slices, x.dtype, x.shape
        ctx.save_for_backward(x.to(layer.dtype), *parameters)
        return x.new_empty((), dtype=layer.dtype).expand(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx, dy: Tensor | None):
        layer: SlicedLayer = ctx.layer
        check_backward(layer.name, dy, advice=LAYER_ADVICE)
        x, *parameters = ctx.saved_tensors
        if dy is None:
            return (None,) * (3 + len(parameters))
        wants_x, _, _, *wanted = ctx.needs_input_grad
        sums, x, dy = Sums(parameters, wanted), rows_of(x), rows_of(dy)
        dx = x.new_empty(x.shape, dtype=ctx.dtype) if wants_x else None
        with without_autocast(x.device.type):
            shared = layer.prepare(parameters)
            for i, (start, stop) in enumerate(ctx.slices):
                rows = slice(start, stop)
                part = None if dx is None else dx[rows]
                layer.backward(shared, x[rows], dy[rows].contiguous(), part, sums, i)
        return None if dx is None else dx.view(ctx.shape), None, None, *sums.finish()


class _Run(torch.autograd.Function):
    """link and x to y."""

    @staticmethod
    def forward(
        ctx,
        link: Tensor | None,  # (..., O)
        x: Tensor,  # (..., H)
        layer: SlicedLayer,
        slices: list[tuple[int, int]],
        parameters: Sequence[Tensor | None],
    ) -> Tensor:
        rows = rows_of(x)
        # in its own shape: autograd would refuse to change a view in place
        y = x.new_empty(*x.shape[:-1], layer.out_features, dtype=layer.dtype)
        filled = y.view(len(rows), layer.out_features)
        with without_autocast(x.device.type):
            shared = layer.prepare(parameters)
            for i, (start, stop) in enumerate(slices):
                filled[start:stop] = layer.forward(shared, rows[start:stop].to(layer.dtype), i)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy, None, None, None, None


def run_sliced(
    layer: SlicedLayer,
    x: Tensor,  # (..., H)
    parameters: Sequence[Tensor | None],
    slices: list[tuple[int, int]],
) -> Tensor:
    """Return y (..., O), in the dtype of the products, computed slice by slice."""
    link = _Keep.apply(x, layer, slices, *parameters)
    return _Run.apply(link, x.detach(), layer, slices, parameters)


def slices_of(x: Tensor, slice_tokens: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each slice of x (..., H)."""
    return chunks_of(slice_tokens, math.prod(x.shape[:-1]))


def slice_tokens(tokens: int, size: int, itemsize: int) -> int | None:
    """Return how many tokens a slice of a gated feed-forward layer takes; None for all at once.

    Args:
        tokens: N.
        size: the intermediate size.
        itemsize: bytes of a number.
    """
    if tokens <= longest_at_once(size, itemsize):
        return None
    return chunk_rows(tokens, GATED_TENSORS * size * itemsize, SLICE_BYTES)


def longest_at_once(size: int, itemsize: int) -> int:
    """Return the most tokens that such a layer takes at once."""
    return LONG_BYTES // (GATED_TENSORS * max(1, size) * itemsize)


def check_slice_tokens(slice_tokens: int | None) -> None:
    """Raise ValueError unless it is a number of tokens or None."""
    is_number = isinstance(slice_tokens, int) and not isinstance(slice_tokens, bool)
    if slice_tokens is not None and not (is_number and slice_tokens > 0):
        raise ValueError(f"slice_tokens must be a number > 0 or None, got {slice_tokens!r}")
