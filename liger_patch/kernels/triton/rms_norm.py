"""Triton form of RMSNorm. The formulas are in ``rms_norm``. R: rows, H: hidden size, P: programs.

Tiles of whole rows: several short ones (attention heads) at a time, or one long one. Extra memory
of the backward pass: (P, H) floats of the weight's gradient, summed in a fixed order. The constants
are the best of those tried on an H200, for rows of 128 to 8192.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.backend import processors, shared_bytes
from liger_patch.kernels.triton.launch import launch

TILE, MAX_ROWS = 4096, 32  # elements of a program at a time, at least, and its rows, at most
PROGRAMS = 2  # on a processor, in the backward pass: each sums its rows' part of dweight
TWO_BLOCKS = 1024  # rows of so many columns may be two blocks in the backward pass
STAGES = 3  # of the loop over tiles: all but one of them are on their way, in shared memory
STAGES_BYTES = 80 * 1024  # of shared memory for them, at most
SCRATCH_BYTES = 6 * 1024  # of shared memory for sums, and for dy and x of two dtypes
SUM_PARTS, SUM_COLUMNS, SUM_WARPS = 128, 16, 8  # a tile of the parts of dweight


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # (R, H)
    weight_ptr,  # (H,) or None
    y_ptr,  # (R, H)
    rows,
    hidden_size,
    eps,
    offset,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per tile of rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_H)
    is_column = column < hidden_size
    mask = (row < rows)[:, None] & is_column[None, :]
    offsets = row[:, None] * hidden_size + column[None, :]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / hidden_size + eps)
    y = x * rstd[:, None]
    if weight_ptr is not None:
        scale = offset + tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
        y *= scale[None, :]
    tl.store(y_ptr + offsets, y, mask=mask)


@triton.jit
def _backward_terms(dy, x, scale, rstd):
    """Return the gradient of the normed x, the normed x, and what dweight sums."""
    normed = x * rstd[:, None]
    return dy * scale[None, :], normed, dy * normed


@triton.jit
def _rms_norm_backward_kernel(
    dy_ptr,  # (R, H)
    x_ptr,  # (R, H)
    weight_ptr,  # (H,) or None
    dx_ptr,  # (R, H)
    dweight_ptr,  # (P, H) or None
    rows,
    hidden_size,
    eps,
    offset,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # of the columns behind BLOCK_H of them; 0 where there are none
    STAGES: tl.constexpr,
):
    """One tile of rows per program at a time, a grid apart; each sums its part of dweight."""
    column = tl.arange(0, BLOCK_H)
    is_column = column < hidden_size
    scale = tl.full((BLOCK_H,), 1.0, dtype=tl.float32)
    if weight_ptr is not None:
        scale = offset + tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_H), dtype=tl.float32)
    if BLOCK_REST > 0:
        rest = BLOCK_H + tl.arange(0, BLOCK_REST)
        is_rest = rest < hidden_size
        rest_scale = tl.full((BLOCK_REST,), 1.0, dtype=tl.float32)
        if weight_ptr is not None:
            rest_scale = offset + tl.load(weight_ptr + rest, mask=is_rest, other=0.0).to(tl.float32)
        rest_dweight = tl.zeros((BLOCK_ROWS, BLOCK_REST), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    step = tl.num_programs(0) * BLOCK_ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_ROWS)
        is_row = row < rows
        offsets = row[:, None] * hidden_size + column[None, :]
        mask = is_row[:, None] & is_column[None, :]
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        squares = tl.sum(x * x, axis=1)
        if BLOCK_REST > 0:
            rest_offsets = row[:, None] * hidden_size + rest[None, :]
            rest_mask = is_row[:, None] & is_rest[None, :]
            rest_dy = tl.load(dy_ptr + rest_offsets, mask=rest_mask, other=0.0).to(tl.float32)
            rest_x = tl.load(x_ptr + rest_offsets, mask=rest_mask, other=0.0).to(tl.float32)
            squares += tl.sum(rest_x * rest_x, axis=1)
        rstd = tl.where(is_row, tl.rsqrt(squares / hidden_size + eps), 0.0)  # eps may be 0
        dnormed, normed, dscale = _backward_terms(dy, x, scale, rstd)
        dweight += dscale
        total = tl.sum(dnormed * normed, axis=1)
        if BLOCK_REST > 0:
            rest_dnormed, rest_normed, dscale = _backward_terms(rest_dy, rest_x, rest_scale, rstd)
            rest_dweight += dscale
            total += tl.sum(rest_dnormed * rest_normed, axis=1)
        mean = (total / hidden_size)[:, None]
        dx = (dnormed - normed * mean) * rstd[:, None]
        tl.store(dx_ptr + offsets, dx, mask=mask)
        if BLOCK_REST > 0:
            dx = (rest_dnormed - rest_normed * mean) * rstd[:, None]
            tl.store(dx_ptr + rest_offsets, dx, mask=rest_mask)
    if dweight_ptr is not None:
        dweight_ptr += tl.program_id(0) * hidden_size
        tl.store(dweight_ptr + column, tl.sum(dweight, axis=0), mask=is_column)
        if BLOCK_REST > 0:
            tl.store(dweight_ptr + rest, tl.sum(rest_dweight, axis=0), mask=is_rest)


@triton.jit
def _sum_parts_kernel(
    parts_ptr,  # (P, H)
    sum_ptr,  # (H,)
    parts,
    hidden_size,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per block of columns."""
    column = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros((BLOCK_P, BLOCK_H), dtype=tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        mask = (part < parts)[:, None] & (column < hidden_size)[None, :]
        offsets = part[:, None] * hidden_size + column[None, :]
        total += tl.load(parts_ptr + offsets, mask=mask, other=0.0)
    tl.store(sum_ptr + column, tl.sum(total, axis=0), mask=column < hidden_size)


def rms_norm(
    x: Tensor,  # (..., H)
    weight: Tensor | None,  # (H,)
    eps: float,
    offset: float,
    y: Tensor,  # (..., H)
) -> None:
    """Write y. The rows of x and y are dense in memory, in the same order."""
    rows, hidden_size = x.numel() // x.shape[-1], x.shape[-1]
    blocks, num_warps = tile(hidden_size)
    if not rows:
        return
    launch(
        _rms_norm_kernel,
        (-(-rows // blocks["BLOCK_ROWS"]),),
        x,
        weight,
        y,
        rows,
        hidden_size,
        eps,
        offset,
        **blocks,
        num_warps=num_warps,
    )


def rms_norm_backward(
    dy: Tensor,  # (..., H)
    x: Tensor,  # (..., H)
    weight: Tensor | None,  # (H,)
    eps: float,
    offset: float,
    dx: Tensor,  # (..., H)
    dweight: Tensor | None,  # (H,)
) -> None:
    """Write dx and, where there is one, dweight. The rows of dy, x and dx are dense in memory, in
    the same order.
    """
    rows, hidden_size = x.numel() // x.shape[-1], x.shape[-1]
    blocks, num_warps = backward_tile(
        hidden_size, x.element_size() + dy.element_size(), shared_bytes(x.device)
    )
    tiles = -(-rows // blocks["BLOCK_ROWS"])
    programs = min(tiles, PROGRAMS * processors(x.device))
    parts = None
    if dweight is not None:
        parts = torch.empty(programs, hidden_size, dtype=torch.float32, device=x.device)
    if rows:
        launch(
            _rms_norm_backward_kernel,
            (programs,),
            dy,
            x,
            weight,
            dx,
            parts,
            rows,
            hidden_size,
            eps,
            offset,
            **blocks,
            num_warps=num_warps,
        )
    if dweight is not None and parts is not None:
        sum_parts(parts, dweight)


def sum_parts(
    parts: Tensor,  # (P, H) float32
    total: Tensor,  # (H,)
) -> None:
    """Write the sum of the rows; all contiguous."""
    programs, hidden_size = parts.shape
    launch(
        _sum_parts_kernel,
        (-(-hidden_size // SUM_COLUMNS),),
        parts,
        total,
        programs,
        hidden_size,
        BLOCK_P=SUM_PARTS,
        BLOCK_H=SUM_COLUMNS,
        num_warps=SUM_WARPS,
    )


@functools.cache
def tile(hidden_size: int) -> tuple[dict[str, Any], int]:
    """Return constants of the forward kernel for rows of this size, and a program's warps."""
    block_h: Any = triton.next_power_of_2(hidden_size)
    return {"BLOCK_ROWS": _block_rows(block_h), "BLOCK_H": block_h}, _warps(block_h)


@functools.cache
def backward_tile(
    hidden_size: int, element_bytes: int, most_bytes: int
) -> tuple[dict[str, Any], int]:
    """Return constants of the backward kernel, and the warps of a program.

    From TWO_BLOCKS columns on, a tile has a second block of columns where one block would have 3/8
    of its lanes idle, or more.

    Args:
        hidden_size: H.
        element_bytes: of an element of dy and of x together.
        most_bytes: of the shared memory that a program can have.
    """
    block_h: Any = triton.next_power_of_2(hidden_size)
    block_rest: Any = 0
    half = block_h // 2
    rest: Any = triton.next_power_of_2(hidden_size - half)
    if hidden_size >= TWO_BLOCKS and rest <= half // 4:
        block_h, block_rest = half, rest
    width = block_h + block_rest
    block_rows = _block_rows(width)
    quarter_idle = 4 * hidden_size <= 3 * width  # idle lanes are no loads on their way
    stages = STAGES + 1 if quarter_idle else STAGES
    tile_bytes = block_rows * width * element_bytes
    fitting = 1 + min(STAGES_BYTES, most_bytes - SCRATCH_BYTES) // tile_bytes
    blocks = {
        "BLOCK_ROWS": block_rows,
        "BLOCK_H": block_h,
        "BLOCK_REST": block_rest,
        "STAGES": min(stages, fitting) if fitting >= STAGES else 1,  # 2 were slower than 1
    }
    return blocks, _warps(width)


def _block_rows(width: int) -> int:
    rows: Any = triton.next_power_of_2(-(-TILE // width))
    return min(MAX_ROWS, rows)


def _warps(width: int) -> int:
    return 4 if width <= 5120 else 8 if width <= 8192 else 16
