"""A linear layer with a LoRA adapter, as the operators of this folder take it.

Autograd functions take tensors and constants apart: ``flattened`` separates a projection into both,
``restored`` puts it together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import autocast_dtype
from liger_patch.kernels.fp8 import Fp8Weight
from liger_patch.kernels.products import QuantizedWeight


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
        return self.weight.dequantized().to(dtype)

    def prepared(self, dtype: torch.dtype) -> LoraProjection:
        """Return the projection for several products in a dtype, which dequantize nothing."""
        if isinstance(self.weight, Fp8Weight) and self.weight.multiplies(dtype):
            return self
        return self._replace(weight=self.dense(dtype))


def without_adapter(weight: Tensor | QuantizedWeight) -> LoraProjection:
    """Return the projection of a weight alone."""
    # no defaults: with dynamic=True torch.compile traces those that are floats as symbols
    return LoraProjection(weight, None, None, None, 1.0, 0.0)


class Constants(NamedTuple):
    """The constants of a projection, beside its tensors.

    Attributes:
        quantized: the weight, if it is quantized; else None.
        a_dtype, b_dtype: the dtypes of the gradients of A and B, None without an adapter.
    """

    quantized: QuantizedWeight | None
    scaling: float
    dropout: float
    a_dtype: torch.dtype | None
    b_dtype: torch.dtype | None


def flattened(projections: Sequence[LoraProjection]) -> tuple[list[Constants], list[Tensor | None]]:
    """Return what autograd functions take: the constants of each projection, and a flat list of
    weight, bias, A and B of each.
    """
    fixed, tensors = [], []
    for weight, bias, a, b, scaling, dropout in projections:
        is_dense = isinstance(weight, Tensor)
        dtypes = (None, None) if a is None else (a.dtype, b.dtype)
        fixed.append(Constants(None if is_dense else weight, scaling, dropout, *dtypes))
        tensors += [weight if is_dense else None, bias, a, b]
    return fixed, tensors


def bases_of(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return weight and bias of each projection, from the tensors of ``flattened``."""
    return [each for i in range(0, len(tensors), 4) for each in tensors[i : i + 2]]


def restored(
    fixed: Sequence[Constants],
    bases: Sequence[Tensor | None],  # weight and bias of each
    a: Tensor | None,  # (sum of R, H); None without adapters
    bs: Sequence[Any],  # (O, R) each
) -> list[LoraProjection]:
    """Return the projections of one input, with the adapters that ``cast_matrices`` has cast."""
    parts = []
    rows = bs if a is None else (a,) if len(bs) == 1 else a.split([b.shape[1] for b in bs])
    for i, (constants, part_a, b) in enumerate(zip(fixed, rows, bs, strict=True)):
        weight, bias = bases[2 * i : 2 * i + 2]
        held: Any = weight if constants.quantized is None else constants.quantized
        how = constants.scaling, constants.dropout
        parts.append(LoraProjection(held, bias, part_a, b, *how))
    return parts


def a_dtypes(fixed: Sequence[Constants], wanted: Sequence[bool]) -> list[torch.dtype | None]:
    """Return the dtype of dA of each projection, None where it is not wanted."""
    return [each.a_dtype if w else None for each, w in zip(fixed, wanted, strict=True)]


@torch.no_grad()
def cast_matrices(groups: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor]:
    """Return the rows of each group of matrices as one matrix in a dtype, all cast at once.

    Adapters are cast in the forward pass, and kept for the backward pass in that form, as autocast
    keeps what it casts. One launch casts all: there are two matrices for every linear layer.
    """
    found, parts, sources = [], [], []
    for group in groups:
        whole = group[0]
        if len(group) > 1:
            sizes = [each.shape[0] for each in group]
            whole = whole.new_empty(sum(sizes), whole.shape[1], dtype=dtype)
            parts += whole.split(sizes)
            sources += group
        elif whole.dtype != dtype:
            whole = whole.new_empty(whole.shape, dtype=dtype)
            parts.append(whole)
            sources += group
        found.append(whole)
    if sources:
        torch._foreach_copy_(parts, sources)  # pyright: ignore[reportPrivateImportUsage]
    return found


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
