"""A linear layer with a LoRA adapter, as the operators of this folder take it.

Autograd functions take tensors and constants apart: ``flattened`` separates a projection into both,
``restored`` puts it together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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

    def prepared(self, dtype: torch.dtype) -> LoraProjection:
        """Return the projection with its weight in a dtype, for several products; FP8 stays."""
        if isinstance(self.weight, Fp8Weight) and self.weight.multiplies(dtype):
            return self
        return self._replace(weight=self.weight.to(dtype))


def without_adapter(weight: Tensor | QuantizedWeight) -> LoraProjection:
    """Return the projection of a weight alone."""
    # no defaults: with dynamic=True torch.compile traces those that are floats as symbols
    return LoraProjection(weight, None, None, None, 1.0, 0.0)


class Constants(NamedTuple):
    """The constants of a projection, beside its tensors.

    Attributes:
        quantized: the weight, if it is quantized; else None.
    """

    quantized: QuantizedWeight | None
    scaling: float
    dropout: float


def flattened(projections: Sequence[LoraProjection]) -> tuple[list[Constants], list[Tensor | None]]:
    """Return what autograd functions take: the constants of each projection, and a flat list of
    weight, bias, A and B of each.
    """
    fixed, tensors = [], []
    for weight, bias, a, b, scaling, dropout in projections:
        is_dense = isinstance(weight, Tensor)
        fixed.append(Constants(None if is_dense else weight, scaling, dropout))
        tensors += [weight if is_dense else None, bias, a, b]
    return fixed, tensors


def restored(
    fixed: Sequence[Constants],
    weights: Sequence[Tensor | None],
    biases: Sequence[Tensor | None],
    a: Tensor | Sequence[Any],  # of projections of one input as one, (sum of R, H), or of each
    bs: Sequence[Any],  # (O, R) each
) -> list[LoraProjection]:
    """Return the projections of constants and tensors; A and B are None without adapters."""
    rows = a.split([b.shape[1] for b in bs]) if isinstance(a, Tensor) else a
    parts = []
    for constants, weight, bias, part_a, b in zip(fixed, weights, biases, rows, bs, strict=True):
        held: Any = weight if constants.quantized is None else constants.quantized
        how = constants.scaling, constants.dropout
        parts.append(LoraProjection(held, bias, part_a, b, *how))
    return parts


@torch.no_grad()
def cast_adapters(
    groups: Sequence[Sequence[LoraProjection]], dtype: torch.dtype
) -> list[tuple[Tensor, list[LoraProjection]]]:
    """Return for each group, projections of one input, A of all as one (sum of R, H), and the
    projections with A and B in a dtype.

    Adapters are cast in the forward pass, and kept for the backward pass in that form, as autocast
    keeps what it casts. One launch casts all: there are two matrices for every linear layer.
    """
    found, copies, sources = [], [], []
    for group in groups:
        whole, rows = group[0].a, (group[0].a,)
        if len(group) > 1 or whole.dtype != dtype:
            ranks = [part.a.shape[0] for part in group]
            whole = whole.new_empty(sum(ranks), whole.shape[1], dtype=dtype)
            rows = whole.split(ranks)
        parts = []
        for (weight, bias, own_a, own_b, scaling, dropout), a in zip(group, rows, strict=True):
            b = own_b
            if a is not own_a:
                copies.append(a)
                sources.append(own_a)
            if own_b.dtype != dtype:
                b = own_b.new_empty(own_b.shape, dtype=dtype)
                copies.append(b)
                sources.append(own_b)
            parts.append(LoraProjection(weight, bias, a, b, scaling, dropout))
        found.append((whole, parts))
    if sources:
        torch._foreach_copy_(copies, sources)  # pyright: ignore[reportPrivateImportUsage]
    return found
