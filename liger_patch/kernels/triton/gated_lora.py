"""Triton form of a gated activation between LoRA adapters. The formulas are in ``lora/mlp``.

N: tokens, I: intermediate size, R: rank, padded to a power of two of at least 16, what the tensor
cores multiply. Each element of gate and up is read once, forward and backward; tiles of them come
through the tensor memory accelerator where there is one (the backward pass takes 0.41 ms instead of
0.68 at N = 16384, I = 8192 on an H200). Extra memory, float32: forward (parts, N, R), backward
(row blocks, 3, I, R), both summed in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.backend import TensorDescriptor, takes_descriptors
from liger_patch.kernels.triton.dropout import keeps, padded_rank
from liger_patch.kernels.triton.gated import KINDS, activation_slope, apply_activation
from liger_patch.kernels.triton.launch import launch

BLOCK_N = 64
BLOCK_I, BLOCK_I_OF_LARGE_RANK, LARGE_RANK = 64, 32, 64  # sums over rows are in registers
WARPS = 4
TILED_STAGES, STAGES = 3, 1  # of the loops over tiles, through the accelerator and without
PROGRAM_COLUMNS = 2048  # of a program of the forward kernel
PROGRAM_ROWS = 1024  # of one of the backward kernel: it writes its sums over rows once


@triton.jit
def _load(source, row, column, offsets, mask, IS_TILED: tl.constexpr):
    if IS_TILED:
        tile = source.load([row, column])  # zero beyond the matrix
    else:
        tile = tl.load(source + offsets, mask=mask, other=0.0)
    return tile


@triton.jit
def _store(target, row, column, offsets, mask, tile, IS_TILED: tl.constexpr):
    if IS_TILED:
        target.store([row, column], tile)
    else:
        tl.store(target + offsets, tile, mask=mask)


@triton.jit
def _thin_rows(ptr, row, rows, stride, first, rank, RANK: tl.constexpr):
    """(BLOCK_N, RANK) of some columns of a thin matrix, zero beyond their rank."""
    r = tl.arange(0, RANK)
    mask = (row < rows)[:, None] & (r < rank)[None, :]
    return tl.load(ptr + row[:, None] * stride + first + r[None, :], mask=mask, other=0.0)


@triton.jit
def _thin_columns(ptr, column, columns, stride, step, rank, RANK: tl.constexpr):
    """(RANK, BLOCK_I) of an adapter's matrix with features ``stride`` and ranks ``step`` apart."""
    r = tl.arange(0, RANK)
    mask = (r < rank)[:, None] & (column < columns)[None, :]
    return tl.load(ptr + column[None, :] * stride + r[:, None] * step, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["seed"])
def _gated_lora_kernel(
    gate,  # (N, I)
    up,  # (N, I)
    a_out,  # (N, I)
    s_ptr,  # (N, gate_rank + up_rank)
    gate_b_ptr,  # (I, gate_rank)
    up_b_ptr,  # (I, up_rank)
    down_a_ptr,  # (down_rank, I)
    parts_ptr,  # (parts, N, RANK) float32
    rows,
    columns,
    gate_rank,
    up_rank,
    down_rank,
    gate_scaling,
    up_scaling,
    seed,
    dropout,
    ACTIVATION: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_TILED: tl.constexpr,  # gate, up and a_out are descriptors of tiles, not pointers
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PROGRAM_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per block of rows and part of the columns."""
    first_row = tl.program_id(0) * BLOCK_N
    row = first_row.to(tl.int64) + tl.arange(0, BLOCK_N)
    stride = gate_rank + up_rank
    s_gate = _thin_rows(s_ptr, row, rows, stride, 0, gate_rank, RANK)
    s_up = _thin_rows(s_ptr, row, rows, stride, gate_rank, up_rank, RANK)
    s_down = tl.zeros((BLOCK_N, RANK), dtype=tl.float32)
    first = tl.program_id(1) * PROGRAM_COLUMNS
    last = tl.minimum(first + PROGRAM_COLUMNS, columns)
    for start in tl.range(first, last, BLOCK_I, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_I)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        offsets = row[:, None] * columns + column[None, :]
        gate_tile = _load(gate, first_row, start, offsets, mask, IS_TILED).to(tl.float32)
        up_tile = _load(up, first_row, start, offsets, mask, IS_TILED).to(tl.float32)
        gate_b = _thin_columns(gate_b_ptr, column, columns, gate_rank, 1, gate_rank, RANK)
        up_b = _thin_columns(up_b_ptr, column, columns, up_rank, 1, up_rank, RANK)
        down_a = _thin_columns(down_a_ptr, column, columns, 1, columns, down_rank, RANK)
        gate_tile += tl.dot(s_gate, gate_b) * gate_scaling
        up_tile += tl.dot(s_up, up_b) * up_scaling
        a = (apply_activation(gate_tile, ACTIVATION) * up_tile).to(s_gate.dtype)
        _store(a_out, first_row, start, offsets, mask, a, IS_TILED)
        if HAS_DROPOUT:
            a = tl.where(keeps(seed, row, column, dropout), a, 0.0)
        s_down = tl.dot(a, tl.trans(down_a), s_down)
    if HAS_DROPOUT:
        s_down /= 1.0 - dropout
    parts_ptr += tl.program_id(1).to(tl.int64) * rows * RANK
    offsets = row[:, None] * RANK + tl.arange(0, RANK)[None, :]
    tl.store(parts_ptr + offsets, s_down, mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["seed"])
def _gated_lora_backward_kernel(
    da,  # (N, I), becomes dgate
    gate,  # (N, I)
    up,  # (N, I)
    dup_out,  # (N, I)
    s_ptr,  # (N, gate_rank + up_rank)
    ds_down_ptr,  # (N, down_rank)
    gate_b_ptr,  # (I, gate_rank)
    up_b_ptr,  # (I, up_rank)
    down_a_ptr,  # (down_rank, I)
    sums_ptr,  # (row blocks, 3, I, RANK) float32: dB of gate and of up, dA' of down
    rows,
    columns,
    gate_rank,
    up_rank,
    down_rank,
    gate_scaling,
    up_scaling,
    seed,
    dropout,
    ACTIVATION: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_TILED: tl.constexpr,  # the first four are descriptors of tiles, not pointers
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PROGRAM_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program per part of the rows and block of columns."""
    first_column = tl.program_id(1) * BLOCK_I
    column = first_column + tl.arange(0, BLOCK_I)
    gate_b = _thin_columns(gate_b_ptr, column, columns, gate_rank, 1, gate_rank, RANK)
    up_b = _thin_columns(up_b_ptr, column, columns, up_rank, 1, up_rank, RANK)
    down_a = _thin_columns(down_a_ptr, column, columns, 1, columns, down_rank, RANK)
    stride = gate_rank + up_rank
    dgate_b = tl.zeros((BLOCK_I, RANK), dtype=tl.float32)
    dup_b = tl.zeros((BLOCK_I, RANK), dtype=tl.float32)
    ddown_a = tl.zeros((BLOCK_I, RANK), dtype=tl.float32)
    first = tl.program_id(0) * PROGRAM_ROWS
    last = tl.minimum(first + PROGRAM_ROWS, rows)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        row = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        offsets = row[:, None] * columns + column[None, :]
        da_tile = _load(da, start, first_column, offsets, mask, IS_TILED).to(tl.float32)
        gate_tile = _load(gate, start, first_column, offsets, mask, IS_TILED).to(tl.float32)
        up_tile = _load(up, start, first_column, offsets, mask, IS_TILED).to(tl.float32)
        s_gate = _thin_rows(s_ptr, row, rows, stride, 0, gate_rank, RANK)
        s_up = _thin_rows(s_ptr, row, rows, stride, gate_rank, up_rank, RANK)
        ds_down = _thin_rows(ds_down_ptr, row, rows, down_rank, 0, down_rank, RANK)
        gate_tile += tl.dot(s_gate, gate_b) * gate_scaling
        up_tile += tl.dot(s_up, up_b) * up_scaling
        through = tl.dot(ds_down, down_a)
        if HAS_DROPOUT:
            kept = keeps(seed, row, column, dropout)
            through = tl.where(kept, through / (1.0 - dropout), 0.0)
        da_tile += through
        activated = apply_activation(gate_tile, ACTIVATION)
        dup = (da_tile * activated).to(s_gate.dtype)
        dgate = (da_tile * up_tile * activation_slope(gate_tile, ACTIVATION)).to(s_gate.dtype)
        a = (activated * up_tile).to(s_gate.dtype)
        _store(dup_out, start, first_column, offsets, mask, dup, IS_TILED)
        if not IS_TILED:
            tl.debug_barrier()  # every thread has read its da before any thread overwrites it
        _store(da, start, first_column, offsets, mask, dgate, IS_TILED)
        dgate_b = tl.dot(tl.trans(dgate), s_gate, dgate_b)
        dup_b = tl.dot(tl.trans(dup), s_up, dup_b)
        if HAS_DROPOUT:
            a = tl.where(kept, a, 0.0)
        ddown_a = tl.dot(tl.trans(a), ds_down, ddown_a)
    if HAS_DROPOUT:
        ddown_a /= 1.0 - dropout
    size = columns * RANK
    sums_ptr += tl.program_id(0).to(tl.int64) * 3 * size
    offsets = column[:, None] * RANK + tl.arange(0, RANK)[None, :]
    is_column = (column < columns)[:, None]
    tl.store(sums_ptr + offsets, dgate_b * gate_scaling, mask=is_column)
    tl.store(sums_ptr + size + offsets, dup_b * up_scaling, mask=is_column)
    tl.store(sums_ptr + 2 * size + offsets, ddown_a, mask=is_column)


def gated_lora(
    gate: Tensor,  # (N, I)
    up: Tensor,  # (N, I)
    s: Tensor,  # (N, R of gate + R of up)
    gate_b: Tensor,  # (I, R)
    up_b: Tensor,  # (I, R)
    down_a: Tensor,  # (R, I)
    gate_scaling: float,
    up_scaling: float,
    seed: int | None,  # of what is dropped before down_a; None where nothing is
    dropout: float,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Return a (N, I) and its product with down_a' (N, R); all contiguous, N and I > 0."""
    rows, columns = gate.shape
    a = torch.empty_like(gate)
    rank = padded_rank(gate_b.shape[1], up_b.shape[1], down_a.shape[0])
    parts = -(-columns // PROGRAM_COLUMNS)
    sums = gate.new_empty(parts, rows, rank, dtype=torch.float32)
    matrices, constants = _matrices(rank, gate, up, a)
    launch(
        _gated_lora_kernel,
        (triton.cdiv(rows, BLOCK_N), parts),
        *matrices,
        s,
        gate_b,
        up_b,
        down_a,
        sums,
        rows,
        columns,
        gate_b.shape[1],
        up_b.shape[1],
        down_a.shape[0],
        gate_scaling,
        up_scaling,
        seed or 0,
        dropout,
        ACTIVATION=KINDS.index(activation),
        HAS_DROPOUT=seed is not None,
        RANK=rank,
        PROGRAM_COLUMNS=PROGRAM_COLUMNS,
        **constants,
    )
    return a, sums.sum(0)[:, : down_a.shape[0]].to(a.dtype)


def gated_lora_backward_(
    da: Tensor,  # (N, I), becomes dgate
    ds_down: Tensor,  # (N, R)
    gate: Tensor,  # (N, I)
    up: Tensor,  # (N, I)
    s: Tensor,  # (N, R of gate + R of up)
    gate_b: Tensor,  # (I, R)
    up_b: Tensor,  # (I, R)
    down_a: Tensor,  # (R, I)
    gate_scaling: float,
    up_scaling: float,
    seed: int | None,  # of what is dropped before down_a; None where nothing is
    dropout: float,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dgate, dup (N, I), and in float32 dB of gate and of up and dA' of down, (I, R) each;
    all contiguous, N and I > 0.
    """
    rows, columns = gate.shape
    dup = torch.empty_like(gate)
    ranks = gate_b.shape[1], up_b.shape[1], down_a.shape[0]
    rank = padded_rank(*ranks)
    parts = -(-rows // PROGRAM_ROWS)
    sums = gate.new_empty(parts, 3, columns, rank, dtype=torch.float32)
    matrices, constants = _matrices(rank, da, gate, up, dup)
    launch(
        _gated_lora_backward_kernel,
        (parts, triton.cdiv(columns, constants["BLOCK_I"])),
        *matrices,
        s,
        ds_down,
        gate_b,
        up_b,
        down_a,
        sums,
        rows,
        columns,
        *ranks,
        gate_scaling,
        up_scaling,
        seed or 0,
        dropout,
        ACTIVATION=KINDS.index(activation),
        HAS_DROPOUT=seed is not None,
        RANK=rank,
        PROGRAM_ROWS=PROGRAM_ROWS,
        **constants,
    )
    each = zip(sums.sum(0), ranks, strict=True)
    dgate_b, dup_b, ddown_a = (total[:, :columns] for total, columns in each)
    return da, dup, dgate_b, dup_b, ddown_a


def _matrices(rank: int, *matrices: Tensor) -> tuple[list[Any], dict[str, Any]]:
    """Return the matrices as the kernels take them, and constants."""
    block_i = BLOCK_I if rank < LARGE_RANK else BLOCK_I_OF_LARGE_RANK
    is_tiled = takes_descriptors(matrices[0].device) and all(
        each.shape[1] % 8 == 0 and each.data_ptr() % 16 == 0 for each in matrices
    )
    constants = {
        "IS_TILED": is_tiled,
        "BLOCK_N": BLOCK_N,
        "BLOCK_I": block_i,
        "STAGES": TILED_STAGES if is_tiled else STAGES,
        "num_warps": WARPS,
    }
    if not is_tiled:
        return list(matrices), constants
    make: Any = TensorDescriptor
    return [make.from_tensor(each, [BLOCK_N, block_i]) for each in matrices], constants
