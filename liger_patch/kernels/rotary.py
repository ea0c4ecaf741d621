"""Rotary position embedding (arXiv:2104.09864) of queries and keys in one launch.

Of the first R of D features of each attention head, x1 and x2 the first and the second half of them
(or, of interleaved pairs, the even and the odd ones):

    y1 = x1 cos1 - x2 sin1          y2 = x2 cos2 + x1 sin2

in float32 (float64 for float64), rounded once; features beyond R are copied. Interleaved pairs stay
so, or become halves: all y1, then all y2 (DeepSeek V3). cos and sin hold the angles of each token,
whatever its position: any order, restarts, packed rows. B: sequences, T: tokens. Saved for the
backward pass: cos and sin, which most models' layers share; no bytes a token beside.
"""

from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    LAYER_ADVICE,
    accumulation_dtype,
    check_backward,
    serves_triton,
)
from liger_patch.kernels.graphs import differentiable, operator


def _rotate_results(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, *others: bool
) -> tuple[Tensor, Tensor]:
    found = []
    for x in (q, k):  # tokens in front of attention heads in memory, as products left them
        _, num_heads, tokens, size = x.shape
        strides = (tokens * num_heads * size, size, num_heads * size, 1)
        # no view: what an autograd function returns is not to be written to where it is one
        found.append(x.new_empty_strided(x.shape, strides, dtype=dtype))
    return found[0], found[1]


@operator(_rotate_results)
def rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    interleaved: bool,
    grouped: bool,
    backward: bool,
) -> tuple[Tensor, Tensor]:
    """Return q and k turned, or turned back."""
    outputs = _rotate_results(q, k, cos, sin, dtype)
    if serves_triton(q, k, cos, sin, outputs[0]):
        from liger_patch.kernels.triton import rotary as rotary_triton

        how = {"interleaved": interleaved, "grouped": grouped, "backward": backward}
        rotary_triton.rotary((q, k), cos, sin, outputs, **how)
        return outputs
    turned = cos.shape[-1] * (2 if interleaved else 1)
    halves = slice(turned // 2), slice(turned // 2, turned)
    pairs = slice(0, turned, 2), slice(1, turned, 2)
    of_x = pairs if interleaved and not (grouped and backward) else halves
    of_y = pairs if interleaved and (backward or not grouped) else halves
    wide = accumulation_dtype(dtype)
    cos, sin = cos[:, None].to(wide), sin[:, None].to(wide)
    cos1, cos2 = (cos, cos) if interleaved else cos.chunk(2, -1)
    sin1, sin2 = (sin, sin) if interleaved else sin.chunk(2, -1)
    if backward:
        sin1, sin2 = -sin2, -sin1
    for x, y in zip((q, k), outputs, strict=True):
        x1, x2 = x[..., of_x[0]].to(wide), x[..., of_x[1]].to(wide)
        y[..., of_y[0]] = x1 * cos1 - x2 * sin1
        y[..., of_y[1]] = x2 * cos2 + x1 * sin2
        y[..., turned:] = x[..., turned:]
    return outputs


def check_rotation(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> None:
    """Raise ValueError for queries, keys and tables that ``rotary`` does not take."""
    if q.dim() != 4 or not q.is_floating_point():
        raise ValueError(
            f"q must be floating point (B, num_heads, T, D), got {q.dtype} {tuple(q.shape)}"
        )
    batch, _, tokens, size = q.shape
    if k is not None:
        expected, given = (batch, tokens, size), f"{k.dtype} {tuple(k.shape)}"
        if k.dim() != 4 or (k.shape[0], *k.shape[2:]) != expected or k.dtype != q.dtype:
            expected = f"({batch}, num_heads, {tokens}, {size})"
            raise ValueError(f"k must be {q.dtype} {expected}, got {given}")
        if k.device != q.device:
            raise ValueError(f"k must be on {q.device} as q is, got {k.device}")
    shape = tuple(cos.shape)
    if len(shape) != 3 or shape[0] not in (1, batch) or shape[1] != tokens:
        raise ValueError(f"cos must have shape ({batch} or 1, {tokens}, R), got {shape}")
    turned = shape[2] * (2 if interleaved else 1)
    if turned % 2 or turned > size:
        given = f"{shape}, {turned} features"
        raise ValueError(f"cos must have an even R of at most {size} features, got {given}")
    if sin.shape != cos.shape:
        raise ValueError(f"sin must have shape {shape} as cos has, got {tuple(sin.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        if not table.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {table.dtype}")
        if table.requires_grad:
            raise ValueError(f"{name} must not require a gradient: none is computed for it")
        if table.device != q.device:
            raise ValueError(f"{name} must be on {q.device} as q is, got {table.device}")


def _save(ctx: Any, inputs: tuple, _: object) -> None:
    q, _, cos, sin, _, *ctx.pairs, backward = inputs
    ctx.save_for_backward(cos, sin)
    ctx.dtype, ctx.turns_back = q.dtype, not backward


def _backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    check_backward("rotary", dq, dk, advice=LAYER_ADVICE)
    cos, sin = ctx.saved_tensors
    interleaved, grouped = ctx.pairs
    turned = rotate(dq, dk, cos, sin, ctx.dtype, interleaved, grouped, ctx.turns_back)
    return *turned, None, None, None, None, None, None


_rotary = differentiable(rotate, _save, _backward)


def rotary(
    q: Tensor,  # (B, num_heads, T, D)
    k: Tensor | None,  # (B, other num_heads, T, D)
    cos: Tensor,  # (B or 1, T, R)
    sin: Tensor,  # (B or 1, T, R)
    *,
    interleaved: bool = False,
    grouped: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by the angles of their tokens' positions.

    Args:
        q, k: (B, num_heads, T, D), each of its own number of heads, of one floating dtype; of any
            strides. Without ``k``, the second result has 0 attention heads.
        cos, sin: (B or 1, T, R), R even and at most D; no gradient is computed for them. Of
            interleaved pairs (B or 1, T, R / 2): one angle for each. Of any strides.
        interleaved: whether a feature's pair is the one beside it, not R / 2 behind it.
        grouped: whether the results of interleaved pairs hold the first feature of each pair, then
            the second one of each.
        dtype: of the results; by default the one that ``q * cos`` has.

    Returns:
        Both, tokens in front of attention heads in memory.

    Raises:
        ValueError: what does not fit.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    check_rotation(q, k, cos, sin, interleaved=interleaved)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating point or None, got {dtype}")
    if k is None:
        k = q.new_empty(len(q), 0, *q.shape[2:])
    if grouped and not interleaved:
        raise ValueError("grouped must be False where interleaved is, got True")
    dtype = dtype or torch.promote_types(q.dtype, cos.dtype)
    return _rotary(q, k, cos, sin, dtype, interleaved, grouped, False)
