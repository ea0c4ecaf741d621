"""Root mean square normalisation with a gate, as layers of linear attention and state-space layers
have it. Behind the norm (Qwen3-Next, arXiv:2412.06464), and in front of it (Mamba-2,
arXiv:2405.21060):

    y = n * weight * act(gate), n = x * rstd            y = n * weight, n = x * act(gate) * rstd

with rstd = 1 / sqrt(mean(h ** 2) + eps), for h the numerator of n, over each group of G of the H
features, in float32 (float64 for float64), rounded once. act = silu, or the logistic function.

R: rows. Saved for the backward pass: the inputs themselves, which their producers mostly hold too,
and rstd, 4 H / G bytes a row.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    LAYER_ADVICE,
    accumulation_dtype,
    check_backward,
    serves_triton,
)
from liger_patch.kernels.graphs import differentiable, operator

MAX_GROUP_SIZE = 8192  # of the Triton form: a group's registers


def _gated_norm_results(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    group_size, *_, dtype = others[3:]
    groups = x.shape[-1] // group_size
    rstd = x.new_empty((*x.shape[:-1], groups), dtype=accumulation_dtype(x.dtype))
    return x.new_empty(x.shape, dtype=dtype), rstd


@operator(_gated_norm_results)
def _gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    group_size: int,
    activation: str,
    gate_first: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return y (..., H) in a dtype, and rstd (..., H / G).

    Args:
        x, gate: (..., H) of one shape, floating point; of any strides.
        weight: (H,) on the same device.
        eps: added to the mean of the squares, >= 0.
        group_size: G, a divisor of H: of how many features a mean is.
        activation: "silu" or "sigmoid".
        gate_first: whether the gate is in front of the norm.
    """
    y, rstd = results = _gated_norm_results(x, gate, weight, eps, group_size, dtype)
    if group_size <= MAX_GROUP_SIZE and serves_triton(x, gate, weight):
        from liger_patch.kernels.triton import gated_norm as gated_norm_triton

        rows = (_rows(x), _rows(gate), weight.contiguous())
        gated_norm_triton.gated_norm(*rows, eps, y, rstd, activation, gate_first)
        return results
    act = _activated(gate, rstd.dtype, activation).value
    h = x.to(rstd.dtype) * act if gate_first else x.to(rstd.dtype)
    h = h.unflatten(-1, (-1, group_size))
    rstd.copy_(torch.rsqrt(h.square().mean(-1).add_(eps)))
    scaled = (h * rstd[..., None]).flatten(-2) * weight.to(rstd.dtype)
    y.copy_(scaled if gate_first else scaled * act)
    return results


def _gated_norm_backward_results(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dweight = weight.new_empty(weight.shape if others[-1] else 0)
    return x.new_empty(x.shape), gate.new_empty(gate.shape), dweight


@operator(_gated_norm_backward_results)
def _gated_norm_backward(
    dy: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    rstd: Tensor,
    activation: str,
    gate_first: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    results = _gated_norm_backward_results(dy, x, gate, weight, wants_weight)
    dx, dgate, dweight = results
    group_size = x.shape[-1] // rstd.shape[-1]
    if group_size <= MAX_GROUP_SIZE and serves_triton(x, gate, weight):
        from liger_patch.kernels.triton import gated_norm as gated_norm_triton

        inputs = (_rows(dy), _rows(x), _rows(gate), weight.contiguous(), rstd.contiguous())
        gradients = (dx, dgate, dweight if wants_weight else None)
        gated_norm_triton.gated_norm_backward(*inputs, *gradients, activation, gate_first)
        return results
    wide, upstream = x.to(rstd.dtype), dy.to(rstd.dtype)
    act = _activated(gate, rstd.dtype, activation)
    rstd = rstd.repeat_interleave(group_size, -1)
    normed = (wide * act.value if gate_first else wide) * rstd
    dnormed = upstream * weight.to(rstd.dtype)
    if not gate_first:
        dgate.copy_(dnormed * normed * act.slope)
        upstream, dnormed = upstream * act.value, dnormed * act.value
    if wants_weight:
        dweight.copy_((upstream * normed).reshape(-1, x.shape[-1]).sum(0))
    mean = (dnormed * normed).unflatten(-1, (-1, group_size)).mean(-1)
    dh = (dnormed - normed * mean.repeat_interleave(group_size, -1)) * rstd
    if gate_first:
        dgate.copy_(dh * wide * act.slope)
        dh = dh * act.value
    dx.copy_(dh)
    return results


class _Activated(NamedTuple):
    value: Tensor
    slope: Tensor


def _activated(gate: Tensor, dtype: torch.dtype, activation: str) -> _Activated:
    gate = gate.to(dtype)
    sigmoid = gate.sigmoid()
    if activation == "silu":
        return _Activated(gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid)))
    return _Activated(sigmoid, sigmoid * (1 - sigmoid))


def _rows(tensor: Tensor) -> Tensor:
    """Return (R, H) of contiguous features, without a copy where the rows are a stride apart."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _save(ctx: Any, inputs: tuple, results: tuple[Tensor, Tensor]) -> None:
    x, gate, weight, _, _, *ctx.form, _ = inputs
    ctx.save_for_backward(x, gate, weight, results[1])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    check_backward("gated_norm", dy, advice=LAYER_ADVICE)
    x, gate, weight, rstd = ctx.saved_tensors
    activation, gate_first = ctx.form
    wanted = ctx.needs_input_grad[:3]
    gradients = _gated_norm_backward(dy, x, gate, weight, rstd, activation, gate_first, wanted[2])
    gradients = (g if wants else None for g, wants in zip(gradients, wanted, strict=True))
    return *gradients, None, None, None, None, None


# of arguments that fit, in the order of ``_gated_norm``'s; y (..., H) is contiguous
run_gated_norm = differentiable(_gated_norm, _save, _backward, first_alone=True)
