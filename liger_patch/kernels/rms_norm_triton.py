"""Triton form of RMSNorm. The formulas are in ``rms_norm``. R: rows, H: hidden size, P: programs.

Tiles of whole rows: several short ones (heads) at a time, or one long one. Extra memory of the
backward pass: (P, H) floats of the weight's gradient, summed in a fixed order. The constants are
the best of those tried on an H200, for rows of 128 to 4096.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.backend import processors

TILE = 4096  # elements that a program holds at a time, or one row
PROGRAMS = 2  # on a processor, in the backward pass: each sums its rows' part of dweight
STAGES = 3  # tiles of dy and x on their way at a time
STAGES_BYTES = 48 * 1024  # of shared memory for them, at most; else one stage
SUM_PARTS, SUM_COLUMNS, SUM_WARPS = 128, 16, 8  # a tile of the parts of dweight


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # (R, H)
    weight_ptr,  # (H,) or None
    y_ptr,  # (R, H)
    rstd_ptr,  # (R,)
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
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit
def _rms_norm_backward_kernel(
    dy_ptr,  # (R, H)
    x_ptr,  # (R, H)
    weight_ptr,  # (H,) or None
    rstd_ptr,  # (R,)
    dx_ptr,  # (R, H)
    dweight_ptr,  # (P, H) or None
    rows,
    hidden_size,
    offset,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Each program walks tiles of rows, a grid apart, and sums their part of dweight."""
    column = tl.arange(0, BLOCK_H)
    is_column = column < hidden_size
    scale = tl.full((BLOCK_H,), 1.0, dtype=tl.float32)
    if weight_ptr is not None:
        scale = offset + tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK_ROWS, BLOCK_H), dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    step = tl.num_programs(0) * BLOCK_ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):
        row = start + tl.arange(0, BLOCK_ROWS)
        mask = (row < rows)[:, None] & is_column[None, :]
        offsets = row[:, None] * hidden_size + column[None, :]
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        normed = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)
        normed *= rstd[:, None]
        dweight += dy * normed
        dy *= scale[None, :]
        mean = tl.sum(dy * normed, axis=1) / hidden_size
        dx = (dy - normed * mean[:, None]) * rstd[:, None]
        tl.store(dx_ptr + offsets, dx, mask=mask)
    if dweight_ptr is not None:
        total = tl.sum(dweight, axis=0)
        dweight_ptr += tl.program_id(0) * hidden_size
        tl.store(dweight_ptr + column, total, mask=is_column)


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
    x: Tensor,  # (R, H) contiguous
    weight: Tensor | None,  # (H,)
    eps: float,
    offset: float,
    y: Tensor,  # (R, H) contiguous
    rstd: Tensor,  # (R,) float32
) -> None:
    """Write y and rstd."""
    rows, hidden_size = x.shape
    blocks, num_warps = tile(hidden_size)
    if not rows:
        return
    with torch.cuda.device_of(x):
        _rms_norm_kernel[(-(-rows // blocks["BLOCK_ROWS"]),)](
            x,
            weight,
            y,
            rstd,
            rows,
            hidden_size,
            eps,
            offset,
            **blocks,
            num_warps=num_warps,  # pyright: ignore[reportCallIssue]
        )


def rms_norm_backward(
    dy: Tensor,  # (R, H) contiguous
    x: Tensor,  # (R, H) contiguous
    weight: Tensor | None,  # (H,)
    rstd: Tensor,  # (R,) float32
    offset: float,
    dx: Tensor,  # (R, H) contiguous
    dweight: Tensor | None,  # (H,)
) -> None:
    """Write dx and, where there is one, dweight."""
    rows, hidden_size = x.shape
    blocks, num_warps = tile(hidden_size)
    tiles = -(-rows // blocks["BLOCK_ROWS"])
    programs = min(tiles, PROGRAMS * processors(x.device))
    parts = None
    if dweight is not None:
        parts = torch.empty(programs, hidden_size, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        if rows:
            _rms_norm_backward_kernel[(programs,)](
                dy,
                x,
                weight,
                rstd,
                dx,
                parts,
                rows,
                hidden_size,
                offset,
                **blocks,
                STAGES=stages(blocks, x.element_size() + dy.element_size()),
                num_warps=num_warps,  # pyright: ignore[reportCallIssue]
            )
        if dweight is not None:
            _sum_parts_kernel[(-(-hidden_size // SUM_COLUMNS),)](
                parts,
                dweight,
                programs,
                hidden_size,
                BLOCK_P=SUM_PARTS,
                BLOCK_H=SUM_COLUMNS,
                num_warps=SUM_WARPS,  # pyright: ignore[reportCallIssue]
            )


@functools.cache
def tile(hidden_size: int) -> tuple[dict[str, Any], int]:
    """Constants of the kernels for rows of this size, and the warps of a program."""
    block_h = triton.next_power_of_2(hidden_size)
    block_rows = max(1, min(32, TILE // block_h))
    return {
        "BLOCK_ROWS": block_rows,
        "BLOCK_H": block_h,
    }, 4 if block_h <= 4096 else 8 if block_h <= 8192 else 16


def stages(blocks: dict[str, Any], row_bytes: int) -> int:
    """How many tiles can be on their way; ``row_bytes``: of an element of each tensor in a row."""
    tile_bytes = blocks["BLOCK_ROWS"] * blocks["BLOCK_H"] * row_bytes
    return STAGES if STAGES * tile_bytes <= STAGES_BYTES else 1
