"""A linear layer with a LoRA adapter, as the operators of this folder take it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import autocast_dtype
from liger_patch.kernels.products import QuantizedWeight

ALIGNED = 8  # numbers: a matrix begins at a multiple of 16 bytes, as products and kernels want it


class LoraProjection(NamedTuple):
    """A linear layer with an adapter.

    Attributes:
        weight: (O, H); a quantized one gets no gradient.
        bias: (O,), or None.
        a, b: (R, H) and (O, R); None for no adapter, which only ``gated_mlp`` takes.
        scaling: factor on what the adapter adds.
        dropout: probability with which each feature of the adapter's input is dropped, in [0, 1).
    """

    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    a: Any
    b: Any
    scaling: float
    dropout: float = 0.0

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (O, H) as a product takes it, dequantized or cast where need be."""
        if isinstance(self.weight, Tensor):
            return self.weight.to(dtype)
        return self.weight.rows(0, self.weight.shape[0]).to(dtype)


def without_adapter(weight: Tensor | QuantizedWeight) -> LoraProjection:
    """Return the projection of a weight alone."""
    # no defaults: with dynamic=True torch.compile traces those that are floats as symbols
    return LoraProjection(weight, None, None, None, 1.0, 0.0)


def flattened(projections: Sequence[LoraProjection]) -> list[Tensor | None]:
    """Return weight, bias, A and B of each projection, as autograd functions take them: None for a
    quantized weight.
    """
    tensors = []
    for weight, bias, a, b, _, _ in projections:
        tensors += [weight if isinstance(weight, Tensor) else None, bias, a, b]
    return tensors


def writes_to(tensors: Sequence[Tensor | None], dtype: torch.dtype | None = None) -> int:
    """Return how often somebody has written to the tensors of ``flattened``; 0 if one is made for
    inference.

    Autograd functions keep these as they are: under checkpointing, Python hooks run three times for
    each saved tensor.

    Args:
        dtype: leaves out adapters of another one, which were cast.
    """
    total = 0
    for i, each in enumerate(tensors):
        if each is None or (i % 4 > 1 and dtype not in (None, each.dtype)):
            continue
        if each.is_inference():
            return 0
        total += each._version
    return total


def check_unchanged(before: int, tensors: Sequence[Tensor | None], *dtype: torch.dtype) -> None:
    """Raise RuntimeError, as autograd does for saved tensors, if ``writes_to`` is another number
    than it was before.
    """
    if writes_to(tensors, *dtype) != before:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            "operation: a weight, bias or adapter, between the forward and the backward pass"
        )


def with_adapters(
    projections: Sequence[LoraProjection], a: Tensor, bs: Sequence[Tensor]
) -> list[LoraProjection]:
    """Return projections with other adapters: a is the A of all as one matrix (sum of R, H)."""
    rows = (a,) if len(bs) == 1 else a.split_with_sizes([b.shape[1] for b in bs])
    each = zip(projections, rows, bs, strict=True)
    return [LoraProjection(p.weight, p.bias, part, b, p.scaling, p.dropout) for p, part, b in each]


@torch.no_grad()
def cast_matrices(
    groups: Sequence[Sequence[Tensor]], dtype: torch.dtype, cast: Tensor | None = None
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the rows of each group of matrices as one matrix in a dtype, and before them the one
    tensor that holds all copies; None where nothing is cast or joined.

    Adapters are cast in the forward pass, and kept for the backward pass in that form, as autocast
    keeps what it casts. One launch casts all: there are two matrices for every linear layer.

    Args:
        cast: that one tensor of an earlier call, whose copies are found in it again.
    """
    found, copies, sources, start, is_new = [], [], [], 0, cast is None
    if is_new:
        size = 0
        for group in groups:
            if len(group) > 1 or group[0].dtype != dtype:
                for each in group:
                    size += each.numel() + ALIGNED
        if not size:
            return None, [each for (each,) in groups]
        cast = groups[0][0].new_empty(size, dtype=dtype)
    elif cast is not None:  # hooks on saved tensors may give it back with other strides
        cast = cast.contiguous()
    for group in groups:
        whole = group[0]
        if cast is not None and (len(group) > 1 or whole.dtype != dtype):
            rows, columns = whole.shape
            if len(group) > 1:
                rows = sum([each.shape[0] for each in group])
            whole = cast.narrow(0, start, rows * columns).view(rows, columns)
            start += -(-rows * columns // ALIGNED) * ALIGNED
            if is_new:
                copies += (
                    whole.split([each.shape[0] for each in group]) if len(group) > 1 else (whole,)
                )
                sources += group
        found.append(whole)
    if is_new:
        torch._foreach_copy_(copies, sources)  # pyright: ignore[reportPrivateImportUsage]
    return cast, found


def products_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of products with x (..., H) now; ValueError unless x can be multiplied."""
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"x must be floating point (..., H), got {x.dtype} {tuple(x.shape)}")
    return autocast_dtype(x.device.type, x.dtype) or x.dtype


def check_projection(
    name: str, projection: LoraProjection, features: int, x: Tensor, dtype: torch.dtype
) -> None:
    """Raise ValueError unless a projection of so many features fits, beside x (..., H) and for
    products in a dtype.
    """
    weight, bias, a, b, _, dropout = projection
    size, rank = weight.shape[0], 0 if a is None else a.shape[0]
    casts = autocast_dtype(x.device.type, x.dtype) is not None
    if len(weight.shape) != 2 or weight.shape[1] != features:
        raise ValueError(
            f"{name}.weight must have shape (O, {features}), got {tuple(weight.shape)}"
        )
    for which, tensor, shape in (
        ("bias", bias, (size,)),
        ("a", a, (rank, features)),
        ("b", b, (size, rank)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name}.{which} must have shape {shape}, got {tuple(tensor.shape)}")
    for which, tensor in (("weight", weight), ("bias", bias), ("a", a), ("b", b)):
        if tensor is None:
            continue
        if tensor.device != x.device:
            raise ValueError(f"{name}.{which} must be on {x.device} as x is, got {tensor.device}")
        if tensor.dtype != dtype and not (casts and tensor.dtype.is_floating_point):
            raise ValueError(
                f"{name}.{which} must be {dtype} as x is, outside autocast, got {tensor.dtype}"
            )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"{name}.dropout must be in [0, 1), got {dropout}")
