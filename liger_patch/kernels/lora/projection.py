"""A linear layer with a LoRA adapter, as the operators of this folder take it, and its check."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import autocast_dtype
from liger_patch.kernels.head.inputs import QuantizedWeight


class LoraProjection(NamedTuple):
    """A linear layer with an adapter.

    Attributes:
        weight: (O, H); one that is quantised has no gradient.
        bias: (O,), or None.
        a: (R, H).
        b: (O, R).
        scaling: factor on what the adapter adds.
        dropout: probability that a feature of x is not seen by the adapter, in [0, 1).
    """

    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scaling: float
    dropout: float = 0.0

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (O, H) as a product takes it, dequantised or cast where need be."""
        if isinstance(self.weight, Tensor):
            return self.weight.to(dtype)
        return self.weight.rows(0, self.weight.shape[0]).to(dtype)


class Constants(NamedTuple):
    """What of a projection is no tensor."""

    quantized: QuantizedWeight | None
    scaling: float
    dropout: float


def flattened(projections: Sequence[LoraProjection]) -> tuple[list[Constants], list[Tensor | None]]:
    """Return what autograd functions take: constants, and tensors in fours."""
    fixed, tensors = [], []
    for weight, bias, a, b, scaling, dropout in projections:
        is_dense = isinstance(weight, Tensor)
        fixed.append(Constants(None if is_dense else weight, scaling, dropout))
        tensors += [weight if is_dense else None, bias, a, b]
    return fixed, tensors


def restored(fixed: Sequence[Constants], tensors: Sequence[Tensor | None]) -> list[LoraProjection]:
    """Return the projections of what ``flattened`` gave."""
    parts = []
    for i, (quantized, scaling, dropout) in enumerate(fixed):
        weight, bias, a, b = tensors[4 * i : 4 * i + 4]
        held: Any = weight if quantized is None else quantized
        assert a is not None
        assert b is not None
        parts.append(LoraProjection(held, bias, a, b, scaling, dropout))
    return parts


def rows_of(tensor: Tensor) -> Tensor:
    """Return (..., H) as (N, H)."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def products_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of products with x (..., H) now; ValueError unless x can be multiplied."""
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"x must be floating point (..., H), got {x.dtype} {tuple(x.shape)}")
    autocast = None if x.dtype == torch.float64 else autocast_dtype(x.device.type)
    return autocast or x.dtype


def check_projection(name: str, projection: LoraProjection, features: int, x: Tensor) -> None:
    """Raise ValueError unless a projection of so many features fits, beside x (..., H)."""
    weight, bias, a, b, _, dropout = projection
    size, rank, dtype = weight.shape[0], a.shape[0], products_dtype(x)
    casts = x.dtype != torch.float64 and autocast_dtype(x.device.type) is not None
    if weight.shape[1] != features:
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
