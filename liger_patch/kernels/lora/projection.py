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


def checked_projections(x: Tensor, projections: Sequence[LoraProjection]) -> torch.dtype:
    """Return the dtype of the products now; ValueError unless the projections fit x (..., H)."""
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"x must be floating point (..., H), got {x.dtype} {tuple(x.shape)}")
    hidden_size, device = x.shape[-1], x.device
    autocast = None if x.dtype == torch.float64 else autocast_dtype(device.type)
    dtype = autocast or x.dtype
    for i, (weight, bias, a, b, _, dropout) in enumerate(projections):
        name = f"projections[{i}]"
        size, rank = weight.shape[0], a.shape[0]
        if weight.shape[1] != hidden_size:
            raise ValueError(
                f"{name}.weight must have shape (O, {hidden_size}), got {tuple(weight.shape)}"
            )
        for which, tensor, shape in (
            ("bias", bias, (size,)),
            ("a", a, (rank, hidden_size)),
            ("b", b, (size, rank)),
        ):
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name}.{which} must have shape {shape}, got {tuple(tensor.shape)}"
                )
        for which, tensor in (("weight", weight), ("bias", bias), ("a", a), ("b", b)):
            if tensor is None:
                continue
            if tensor.device != device:
                raise ValueError(f"{name}.{which} must be on {device} as x is, got {tensor.device}")
            casts = autocast is not None and tensor.dtype.is_floating_point
            if not casts and tensor.dtype != dtype:
                raise ValueError(
                    f"{name}.{which} must be {dtype} as x is, outside autocast, got {tensor.dtype}"
                )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"{name}.dropout must be in [0, 1), got {dropout}")
    return dtype
