"""Triton form of what brings tokens to their experts and back: the order of slots by expert, their
rows, and the sum of each token's slots.

The order is a counting sort, of two launches where PyTorch's operations take a dozen: programs
count the slots of each expert in their blocks, then each finds where its own slots go, behind those
of all blocks before it. Slots of one expert keep their order.

S: slots (a token and one of its experts), E: experts, H: hidden size, R: rank, a power of two of at
least 16. Extra memory: 4 E bytes for each of up to PROGRAMS blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.triton.launch import launch

PROGRAMS = 128  # that order slots, at most: each reads the counts of all
STEP = 32  # slots at a time, each compared with all experts
ORDER_WARPS = 8
BLOCK_S = 64  # rows of one expert in a program
BLOCK_H = 128  # features at a time; with 64 rows, 64 numbers a thread
GATHER_BLOCK = 64
SUM_BLOCK = 1024  # features of a program that sums slots
WARPS = 4


@triton.jit
def _count_slots_kernel(
    index_ptr,  # (S,) integers
    counts_ptr,  # (programs, EXPERTS) int32
    slots,
    steps,
    EXPERTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program per block of STEP * steps slots."""
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    count = tl.zeros((EXPERTS,), dtype=tl.int32)
    for step in range(steps):
        slot = (block * steps + step) * STEP + tl.arange(0, STEP)
        own = tl.load(index_ptr + slot, mask=slot < slots, other=-1)
        count += tl.sum((own[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + block * EXPERTS + expert, count)


@triton.jit
def _order_slots_kernel(
    index_ptr,  # (S,) integers
    counts_ptr,  # (programs, EXPERTS) int32
    offsets_ptr,  # (experts,) int32
    slots_ptr,  # (S,) int32
    places_ptr,  # (S,) int32
    slots,
    experts,
    steps,
    blocks,
    EXPERTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program per block of STEP * steps slots."""
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    before = tl.zeros((EXPERTS,), dtype=tl.int32)
    for start in range(0, blocks, STEP):
        other = (start + tl.arange(0, STEP))[:, None]
        counts = tl.load(counts_ptr + other * EXPERTS + expert, mask=other < blocks, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where(other < block, counts, 0), 0)
    end = tl.cumsum(total, 0)
    if block == 0:
        tl.store(offsets_ptr + expert, end, mask=expert < experts)
    free = end - total + before  # the first place of each expert that is free
    for step in range(steps):
        slot = (block * steps + step) * STEP + tl.arange(0, STEP)
        is_slot = slot < slots
        own = tl.load(index_ptr + slot, mask=is_slot, other=-1)
        is_own = (own[:, None] == expert[None, :]).to(tl.int32)
        place = tl.sum(is_own * (free[None, :] + tl.cumsum(is_own, 0) - 1), 1)
        tl.store(slots_ptr + place, slot, mask=is_slot)
        tl.store(places_ptr + slot, place, mask=is_slot)
        free += tl.sum(is_own, 0)


@triton.jit
def rows_of_tile(offsets_ptr, experts, BLOCK_S: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the expert of a program's rows, the first of them, and where the expert's end. Blocks
    of rows are counted expert by expert; a program beyond the last block has no rows.
    """
    tile = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < experts
    stop = tl.load(offsets_ptr + expert, mask=is_expert, other=0)
    start = tl.load(offsets_ptr + expert - 1, mask=is_expert & (expert > 0), other=0)
    tiles = tl.where(is_expert, (stop - start + BLOCK_S - 1) // BLOCK_S, 0)
    last_tile = tl.cumsum(tiles, 0)
    is_own = (tile < last_tile) & (tile >= last_tile - tiles)
    first = tl.sum(tl.where(is_own, start + (tile - last_tile + tiles) * BLOCK_S, 0), 0)
    end = tl.sum(tl.where(is_own, stop, 0), 0)
    return tl.sum(tl.where(is_own, expert, 0), 0).to(tl.int64), first.to(tl.int64), end


@triton.jit
def _gather_kernel(
    x_ptr,  # (N, features)
    slots_ptr,  # (S,): the place of each row in (N, SLOTS)
    rows_ptr,  # (S, features)
    a_ptr,  # (experts, R, features), of any strides, or None
    thin_ptr,  # (S, R): rows times a', None where a is
    offsets_ptr,  # (experts,)
    experts,
    features,
    a_expert_stride,
    a_rank_stride,
    a_stride,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per block of an expert's rows."""
    expert, first, end = rows_of_tile(offsets_ptr, experts, BLOCK_S, EXPERTS)  # pyright: ignore
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_S)
    is_row = row < end
    token = (tl.load(slots_ptr + row, mask=is_row, other=0) // SLOTS).to(tl.int64)
    r = tl.arange(0, RANK)
    if a_ptr is not None:
        a_ptr += expert * a_expert_stride
    thin = tl.zeros((BLOCK_S, RANK), dtype=tl.float32)
    for start in range(0, features, BLOCK_H):
        feature = start + tl.arange(0, BLOCK_H)
        is_feature = feature < features
        mask = is_row[:, None] & is_feature[None, :]
        place = token[:, None] * features + feature[None, :]
        x = tl.load(x_ptr + place, mask=mask, other=0.0)
        tl.store(rows_ptr + row[:, None] * features + feature[None, :], x, mask=mask)
        if a_ptr is not None:
            of_a = feature[:, None] * a_stride + r[None, :] * a_rank_stride
            thin += tl.dot(x, tl.load(a_ptr + of_a, mask=is_feature[:, None], other=0.0))
    if a_ptr is not None:
        tl.store(thin_ptr + row[:, None] * RANK + r[None, :], thin, mask=is_row[:, None])


@triton.jit
def _sum_slots_kernel(
    y_ptr,  # (S, features)
    place_ptr,  # (N, SLOTS): where a token's slots are among the rows of y
    weights_ptr,  # (N, SLOTS), None for ones
    bias_ptr,  # (experts, features), or None
    index_ptr,  # (N, SLOTS): experts, None where the bias is
    out_ptr,  # (N, features)
    features,
    SLOTS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per token and block of features."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = feature < features
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for slot in tl.static_range(SLOTS):
        place = tl.load(place_ptr + token * SLOTS + slot).to(tl.int64)
        y = tl.load(y_ptr + place * features + feature, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            expert = tl.load(index_ptr + token * SLOTS + slot).to(tl.int64)
            of_bias = bias_ptr + expert * features + feature
            y += tl.load(of_bias, mask=mask, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            y *= tl.load(weights_ptr + token * SLOTS + slot).to(tl.float32)
        total += y
    tl.store(out_ptr + token * features + feature, total, mask=mask)


def tiles_of(rows: int, experts: int) -> int:
    """Return how many blocks of rows there may be at most: the host does not read the counts."""
    return -(-rows // BLOCK_S) + min(experts, rows)


def order_slots(
    index: Tensor,  # (N, K) integers in [0, E)
    offsets: Tensor,  # (E,) int32
    slots: Tensor,  # (S,) int32
    places: Tensor,  # (N, K) int32
) -> None:
    """Write where the slots of each expert end, the slots sorted by expert, and the place of each
    slot among the sorted ones; all contiguous, S > 0.
    """
    count, experts = len(slots), len(offsets)
    steps = triton.cdiv(count, STEP * PROGRAMS)
    blocks = triton.cdiv(count, STEP * steps)
    sizes = {"EXPERTS": triton.next_power_of_2(experts), "STEP": STEP, "num_warps": ORDER_WARPS}
    counts = torch.empty(blocks * sizes["EXPERTS"], dtype=torch.int32, device=index.device)
    launch(_count_slots_kernel, (blocks,), index, counts, count, steps, **sizes)
    tensors = index, counts, offsets, slots, places
    launch(_order_slots_kernel, (blocks,), *tensors, count, experts, steps, blocks, **sizes)


def gather(
    x: Tensor,  # (N, H)
    slots: Tensor,  # (S,)
    rows: Tensor,  # (S, H)
    a: Tensor | None,  # (E, R, H), of any strides
    thin: Tensor | None,  # (S, R)
    offsets: Tensor,  # (E,) int32
) -> None:
    """Write the rows of the slots' tokens, and their products with their experts' matrices; all but
    a contiguous, S > 0.
    """
    experts = len(offsets)
    launch(
        _gather_kernel,
        (tiles_of(len(rows), experts),),
        x,
        slots,
        rows,
        a,
        thin,
        offsets,
        experts,
        x.shape[1],
        *((0, 0, 0) if a is None else a.stride()),
        SLOTS=len(rows) // len(x),
        RANK=16 if a is None else a.shape[1],
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK_S=BLOCK_S,
        BLOCK_H=GATHER_BLOCK,
        num_warps=WARPS,
    )


def sum_slots(
    y: Tensor,  # (S, H)
    place: Tensor,  # (N, K)
    weights: Tensor | None,  # (N, K)
    bias: Tensor | None,  # (E, H)
    index: Tensor,  # (N, K)
    out: Tensor,  # (N, H)
) -> None:
    """Write the weighted sum of each token's slots; all contiguous, N > 0."""
    tokens, slots = place.shape
    block = min(SUM_BLOCK, triton.next_power_of_2(y.shape[1]))
    launch(
        _sum_slots_kernel,
        (tokens, triton.cdiv(y.shape[1], block)),
        y,
        place,
        weights,
        bias,
        None if bias is None else index,
        out,
        y.shape[1],
        SLOTS=slots,
        BLOCK_H=block,
        num_warps=WARPS,
    )
