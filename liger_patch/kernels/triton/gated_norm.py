"""Triton form of RMSNorm with a gate. The formulas are in ``gated_norm``. R: rows, H: hidden size,
G: features of a group, P: programs of a group.

Extra memory of the backward pass: (P, H) floats of the weight's gradient, summed in a fixed order.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.backend import processors
from liger_patch.kernels.triton.gated import sigmoid
from liger_patch.kernels.triton.launch import launch
from liger_patch.kernels.triton.rms_norm import sum_parts

TILE, MAX_ROWS = 2048, 32  # elements of a program at a time, at least, and its rows, at most
PROGRAMS = 4  # on a processor, in the backward pass: each sums its rows' part of dweight


@triton.jit
def _activate(gate, IS_SILU: tl.constexpr, IS_FLOAT32: tl.constexpr):
    """Return act(gate) and its derivative."""
    share = sigmoid(gate, IS_FLOAT32)
    if IS_SILU:
        value, slope = gate * share, share * (1.0 + gate * (1.0 - share))
    else:
        value, slope = share, share * (1.0 - share)
    return value, slope


@triton.jit
def _gated_norm_kernel(
    x_ptr,  # (R, H)
    x_stride,
    gate_ptr,  # (R, H)
    gate_stride,
    weight_ptr,  # (H,)
    y_ptr,  # (R, H) contiguous
    rstd_ptr,  # (R, H / G)
    rows,
    group_size,
    eps,
    IS_SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """One program per tile of rows of a group."""
    group, groups = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = tl.arange(0, BLOCK_G)
    column = group * group_size + inside
    mask = (row < rows)[:, None] & (inside < group_size)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
    gate = tl.load(gate_ptr + row[:, None] * gate_stride + column[None, :], mask=mask, other=0.0)
    weight = tl.load(weight_ptr + column, mask=inside < group_size, other=0.0).to(tl.float32)
    is_float32: tl.constexpr = gate_ptr.dtype.element_ty == tl.float32
    act, _ = _activate(gate.to(tl.float32), IS_SILU, is_float32)  # pyright: ignore
    h = x.to(tl.float32)
    if GATE_FIRST:
        h *= act
    rstd = tl.rsqrt(tl.sum(h * h, axis=1) / group_size + eps)
    y = h * rstd[:, None] * weight[None, :]
    if not GATE_FIRST:
        y *= act
    offsets = row[:, None] * (groups * group_size) + column[None, :]
    tl.store(y_ptr + offsets, y, mask=mask)
    tl.store(rstd_ptr + row * groups + group, rstd, mask=row < rows)


@triton.jit
def _gated_norm_backward_kernel(
    dy_ptr,  # (R, H)
    dy_stride,
    x_ptr,  # (R, H)
    x_stride,
    gate_ptr,  # (R, H)
    gate_stride,
    weight_ptr,  # (H,)
    rstd_ptr,  # (R, H / G)
    dx_ptr,  # (R, H) contiguous
    dgate_ptr,  # (R, H) contiguous
    dweight_ptr,  # (P, H) or None
    rows,
    group_size,
    IS_SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """One tile of rows of a group per program at a time; each sums its part of dweight."""
    group, groups = tl.program_id(1), tl.num_programs(1)
    inside = tl.arange(0, BLOCK_G)
    column = group * group_size + inside
    is_inside = inside < group_size
    is_float32: tl.constexpr = gate_ptr.dtype.element_ty == tl.float32
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_G), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    for start in tl.range(first, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & is_inside[None, :]
        rstd = tl.load(rstd_ptr + row * groups + group, mask=row < rows, other=0.0)[:, None]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + column[None, :], mask=mask, other=0.0)
        x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
        x, upstream = x.to(tl.float32), dy.to(tl.float32)
        gate = tl.load(
            gate_ptr + row[:, None] * gate_stride + column[None, :], mask=mask, other=0.0
        )
        act, slope = _activate(gate.to(tl.float32), IS_SILU, is_float32)  # pyright: ignore
        # within the loop: long groups leave no registers for it
        weight = tl.load(weight_ptr + column, mask=is_inside, other=0.0).to(tl.float32)[None, :]
        offsets = row[:, None] * (groups * group_size) + column[None, :]
        if GATE_FIRST:
            normed = x * act * rstd
            x_slope = x * slope
        else:
            normed = x * rstd
            tl.store(dgate_ptr + offsets, upstream * weight * normed * slope, mask=mask)
            upstream *= act
        dweight += upstream * normed
        dnormed = upstream * weight
        mean = (tl.sum(dnormed * normed, axis=1) / group_size)[:, None]
        dh = (dnormed - normed * mean) * rstd
        if GATE_FIRST:
            tl.store(dgate_ptr + offsets, dh * x_slope, mask=mask)
            dh *= act
        tl.store(dx_ptr + offsets, dh, mask=mask)
    if dweight_ptr is not None:
        dweight_ptr += tl.program_id(0) * groups * group_size
        tl.store(dweight_ptr + column, tl.sum(dweight, axis=0), mask=is_inside)


def gated_norm(
    x: Tensor,  # (R, H)
    gate: Tensor,  # (R, H)
    weight: Tensor,  # (H,)
    eps: float,
    y: Tensor,  # (..., H)
    rstd: Tensor,  # (..., H / G) float32
    activation: str,
    gate_first: bool,
) -> None:
    """Write y and rstd. Features are contiguous; all but x and gate are."""
    groups = rstd.shape[-1]
    group_size = x.shape[1] // groups
    blocks, num_warps = tile(group_size)
    if not len(x):
        return
    launch(
        _gated_norm_kernel,
        (-(-len(x) // blocks["BLOCK_ROWS"]), groups),
        x,
        x.stride(0),
        gate,
        gate.stride(0),
        weight,
        y,
        rstd,
        len(x),
        group_size,
        eps,
        IS_SILU=activation == "silu",
        GATE_FIRST=gate_first,
        **blocks,
        num_warps=num_warps,
    )


def gated_norm_backward(
    dy: Tensor,  # (R, H)
    x: Tensor,  # (R, H)
    gate: Tensor,  # (R, H)
    weight: Tensor,  # (H,)
    rstd: Tensor,  # (..., H / G) float32
    dx: Tensor,  # (..., H)
    dgate: Tensor,  # (..., H)
    dweight: Tensor | None,  # (H,)
    activation: str,
    gate_first: bool,
) -> None:
    """Write dx, dgate and, where there is one, dweight. Features are contiguous; all but dy, x and
    gate are.
    """
    rows, hidden_size = x.shape
    groups = rstd.shape[-1]
    blocks, num_warps = tile(hidden_size // groups)
    tiles = -(-rows // blocks["BLOCK_ROWS"])
    programs = min(tiles, -(-PROGRAMS * processors(x.device) // groups))
    parts = None
    if dweight is not None:
        parts = torch.empty(programs, hidden_size, dtype=torch.float32, device=x.device)
    if rows:
        launch(
            _gated_norm_backward_kernel,
            (programs, groups),
            dy,
            dy.stride(0),
            x,
            x.stride(0),
            gate,
            gate.stride(0),
            weight,
            rstd,
            dx,
            dgate,
            parts,
            rows,
            hidden_size // groups,
            IS_SILU=activation == "silu",
            GATE_FIRST=gate_first,
            **blocks,
            num_warps=num_warps,
        )
    if dweight is not None and parts is not None:
        sum_parts(parts, dweight)


@functools.cache
def tile(group_size: int) -> tuple[dict[str, Any], int]:
    """Return constants of the kernels for groups of this size, and a program's warps."""
    block_g: Any = triton.next_power_of_2(group_size)
    block_rows: Any = min(MAX_ROWS, triton.next_power_of_2(-(-TILE // block_g)))
    num_warps = 4 if block_g <= 2048 else 8 if block_g <= 4096 else 16
    return {"BLOCK_ROWS": block_rows, "BLOCK_G": block_g}, num_warps
