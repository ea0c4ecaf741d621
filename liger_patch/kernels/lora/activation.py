"""The activation of a gated feed-forward layer between its LoRA adapters, forward and backward.

The formulas are in ``mlp``. I: intermediate size, R: rank, N: tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_patch.kernels.gated import gated_backward, gated_forward
from liger_patch.kernels.lora.products import (
    Kept,
    adapter_gradient_,
    b_gradient,
    columns_of,
    new_seed,
    serves_lora,
    thin_product_,
    upstream_thin_products,
)
from liger_patch.kernels.lora.projection import LoraProjection


def activate(
    gate: Tensor,  # (N, I) of the base
    up: Tensor,  # (N, I) of the base
    s: Tensor,  # (N, R of gate + R of up)
    parts: Sequence[LoraProjection],
    down_a: Tensor,  # (R, I)
    dropout: float,
    activation: str,
    seed: int | None = None,  # of what is dropped, where it is not a new one
) -> tuple[Tensor, Tensor, Kept]:
    """Return a (N, I), Sd (N, R), and which features of a its adapter sees."""
    if _serves(gate, parts, down_a):
        from liger_patch.kernels.triton.gated_lora import gated_lora

        seed = new_seed() if dropout and seed is None else seed
        adapters = _adapters(parts, down_a)
        return *gated_lora(gate, up, s, *adapters, seed, dropout, activation), seed
    a = gated_forward(*_with_adapters(gate, up, s, parts), activation)
    s_down = a.new_empty(len(a), len(down_a))
    return a, s_down, thin_product_(s_down, a, down_a, dropout, seed)


def activate_backward(
    da: Tensor,  # (N, I) through the base, overwritten
    ds_down: Tensor,  # (N, R)
    gate: Tensor,
    up: Tensor,
    s: Tensor,
    parts: Sequence[LoraProjection],
    down_a: Tensor,
    kept: Kept,
    dropout: float,
    activation: str,
    dtypes: Sequence[torch.dtype | None],  # of dB of both and of dA of down
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None], Tensor | None]:
    """Return dgate, dup (N, I), ds (N, R of gate + R of up), dB of both and dA of down; None where
    no dtype is given.
    """
    *b_dtypes, a_dtype = dtypes
    if _serves(gate, parts, down_a) and not isinstance(kept, Tensor):
        from liger_patch.kernels.triton.gated_lora import gated_lora_backward_

        adapters = _adapters(parts, down_a)
        # hooks of saved tensors may have given these other strides
        gate, up, s = (each.contiguous() for each in (gate, up, s))
        dgate, dup, dgate_b, dup_b, ddown_a = gated_lora_backward_(
            da, ds_down, gate, up, s, *adapters, kept, dropout, activation
        )
        ds = upstream_thin_products((dgate, dup), parts)
        found = zip((dgate_b, dup_b, ddown_a.t()), dtypes, strict=True)
        *dbs, ddown_a = (None if dtype is None else each.to(dtype) for each, dtype in found)
        return dgate, dup, ds, dbs, ddown_a
    gate, up = _with_adapters(gate, up, s, parts)
    a = gated_forward(gate, up, activation)
    ddown_a = adapter_gradient_(da, a, down_a, ds_down, kept, a_dtype, dropout)
    del a
    dgate, dup = gated_backward(da, gate, up, activation)
    ds = upstream_thin_products((dgate, dup), parts)
    each = zip((dgate, dup), parts, columns_of(s, parts), b_dtypes, strict=True)
    dbs = [None if d is None else b_gradient(dy, part, thin, d) for dy, part, thin, d in each]
    return dgate, dup, ds, dbs, ddown_a


def _with_adapters(
    gate: Tensor, up: Tensor, s: Tensor, parts: Sequence[LoraProjection]
) -> tuple[Tensor, Tensor]:
    gate_part, up_part = parts
    s_gate, s_up = columns_of(s, parts)
    gate = torch.addmm(gate, s_gate, gate_part.b.t(), alpha=gate_part.scaling)
    up = torch.addmm(up, s_up, up_part.b.t(), alpha=up_part.scaling)
    return gate, up


def _serves(gate: Tensor, parts: Sequence[LoraProjection], down_a: Tensor) -> bool:
    ranks = (*(len(part.a) for part in parts), len(down_a))
    return serves_lora(gate, max(ranks))


def _adapters(
    parts: Sequence[LoraProjection], down_a: Tensor
) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """Return what the Triton form takes of three adapters."""
    gate, up = parts
    gate_b, up_b, down_a = (each.contiguous() for each in (gate.b, up.b, down_a))
    return gate_b, up_b, down_a, gate.scaling, up.scaling
