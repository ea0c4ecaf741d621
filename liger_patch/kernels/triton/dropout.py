"""Thin products of LoRA adapters that do not see every feature of their input.

    s = d(x) A'        dA = ds' d(x)        dx += k (ds A) / (1 - p)        d(x) = k x / (1 - p)

with k 0 for a feature that is dropped and 1 for others. k is a hash of the seed, the row and the
feature: computed where it is needed, forward and backward, and never written. N: tokens, H:
features, R: rank, padded to a power of two of at least 16. Extra memory of the backward pass,
float32: (row parts, H, R), summed in a fixed order. Source of the hash: lowbias32 of Chris Wellons'
"Prospecting for Hash Functions" (2018).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.triton.launch import launch

BLOCK_N, BLOCK_H = 64, 64
WARPS = 4
PROGRAM_ROWS = 1024  # of a program of the backward kernel: it writes its sums over rows once


@triton.jit
def _hash(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def keeps(seed, row, column, dropout):
    """Return which of the features (rows, columns) are kept; each is dropped with ``dropout``."""
    of_row = _hash(row.to(tl.uint32) ^ seed.to(tl.uint32))
    number = _hash(of_row[:, None] + column.to(tl.uint32)[None, :] * 0x9E3779B1)
    # 24 bits are exact in float32
    return (number >> 8).to(tl.float32) >= dropout * 16777216.0


@triton.jit(do_not_specialize=["seed"])
def _dropped_product_kernel(
    x_ptr,  # (N, H)
    a_ptr,  # (R, H)
    s_ptr,  # (N, R)
    rows,
    columns,
    rank,
    s_stride,
    seed,
    dropout,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per block of rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, RANK)
    s = tl.zeros((BLOCK_N, RANK), dtype=tl.float32)
    for start in range(0, columns, BLOCK_H):
        column = start + tl.arange(0, BLOCK_H)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=mask, other=0.0)
        x = tl.where(keeps(seed, row, column, dropout), x, 0.0)
        a_mask = (column < columns)[:, None] & (r < rank)[None, :]
        a = tl.load(a_ptr + r[None, :] * columns + column[:, None], mask=a_mask, other=0.0)
        s = tl.dot(x, a, s)
    mask = (row < rows)[:, None] & (r < rank)[None, :]
    tl.store(s_ptr + row[:, None] * s_stride + r[None, :], s / (1.0 - dropout), mask=mask)


@triton.jit(do_not_specialize=["seed"])
def _dropped_gradients_kernel(
    x_ptr,  # (N, H)
    a_ptr,  # (R, H)
    ds_ptr,  # (N, R)
    dx_ptr,  # (N, H), added to; None where it is not wanted
    sums_ptr,  # (row parts, H, RANK) float32: dA'
    rows,
    columns,
    rank,
    ds_stride,
    seed,
    dropout,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr,
):
    """One program per part of the rows and block of columns."""
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    r = tl.arange(0, RANK)
    a_mask = (r < rank)[:, None] & (column < columns)[None, :]
    a = tl.load(a_ptr + r[:, None] * columns + column[None, :], mask=a_mask, other=0.0)
    da = tl.zeros((BLOCK_H, RANK), dtype=tl.float32)
    scale = 1.0 / (1.0 - dropout)
    first = tl.program_id(0) * PROGRAM_ROWS
    for start in range(first, tl.minimum(first + PROGRAM_ROWS, rows), BLOCK_N):
        row = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        offsets = row[:, None] * columns + column[None, :]
        kept = keeps(seed, row, column, dropout)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
        ds_mask = (row < rows)[:, None] & (r < rank)[None, :]
        ds = tl.load(ds_ptr + row[:, None] * ds_stride + r[None, :], mask=ds_mask, other=0.0)
        da = tl.dot(tl.trans(tl.where(kept, x, 0.0)), ds, da)
        if dx_ptr is not None:
            dx = tl.load(dx_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            dx += tl.where(kept, tl.dot(ds, a) * scale, 0.0)
            tl.store(dx_ptr + offsets, dx, mask=mask)
    sums_ptr += tl.program_id(0).to(tl.int64) * columns * RANK
    offsets = column[:, None] * RANK + r[None, :]
    tl.store(sums_ptr + offsets, da * scale, mask=(column < columns)[:, None])


def dropped_product_(
    s: Tensor,  # (N, R), columns next to each other
    x: Tensor,  # (N, H)
    a: Tensor,  # (R, H)
    seed: int,
    dropout: float,
) -> None:
    """Write s; x and a contiguous, N and H > 0."""
    rows, columns = x.shape
    launch(
        _dropped_product_kernel,
        (triton.cdiv(rows, BLOCK_N),),
        x,
        a,
        s,
        rows,
        columns,
        len(a),
        s.stride(0),
        seed,
        dropout,
        RANK=padded_rank(len(a)),
        BLOCK_N=BLOCK_N,
        BLOCK_H=BLOCK_H,
        num_warps=WARPS,
    )


def dropped_gradients(
    dx: Tensor | None,  # (N, H), added to
    x: Tensor,  # (N, H)
    a: Tensor,  # (R, H)
    ds: Tensor,  # (N, R), columns next to each other
    seed: int,
    dropout: float,
) -> Tensor:
    """Add to dx and return dA (R, H) in float32; dx, x and a contiguous, N and H > 0."""
    rows, columns = x.shape
    parts, rank = -(-rows // PROGRAM_ROWS), padded_rank(len(a))
    sums = x.new_empty(parts, columns, rank, dtype=torch.float32)
    launch(
        _dropped_gradients_kernel,
        (parts, triton.cdiv(columns, BLOCK_H)),
        x,
        a,
        ds,
        dx,
        sums,
        rows,
        columns,
        len(a),
        ds.stride(0),
        seed,
        dropout,
        RANK=rank,
        BLOCK_N=BLOCK_N,
        BLOCK_H=BLOCK_H,
        PROGRAM_ROWS=PROGRAM_ROWS,
        num_warps=WARPS,
    )
    return sums.sum(0)[:, : len(a)].t()


def padded_rank(*ranks: int) -> int:
    """Return the power of two, from 16 on, that tiles of these ranks have."""
    powers: list[Any] = [triton.next_power_of_2(rank) for rank in ranks]
    return max(16, *powers)
