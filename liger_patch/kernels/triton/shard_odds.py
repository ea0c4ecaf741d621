"""Triton form of the few numbers of a row of odds that other shards of the vocabulary need.

``odds`` leaves sums, maxima and moments of each tile of TILE_V classes. This kernel reduces those
of a shard to two: one for the tiles up to that of the label, one for the tiles after it. They stay
apart because ``is_top1`` asks whether the label is the first of several largest logits.
``finish_kernel`` reads these two of each shard, one shard after the other, and nothing else of a
distributed vocabulary.

C: rows, T: tiles of the shard. Extra memory: 4 C floats, 6 C with statistics.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS: dict[str, Any] = {"BLOCK_ROWS": 8, "BLOCK_TILES": 256}


@triton.jit
def _until_and_after(
    numbers_ptr,  # of the first tile
    label,  # (BLOCK_ROWS,)
    row,
    is_row,
    v_tiles,
    stride,  # from tile to tile
    IS_MAX: tl.constexpr,
    TILE_V: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """Return the sums, or maxima, over the tiles until each label's own and over those after it."""
    empty = float("-inf") if IS_MAX else 0.0
    until = tl.full(row.shape, empty, dtype=tl.float32)
    after = until
    for first in range(0, v_tiles, BLOCK_TILES):
        tile = (first + tl.arange(0, BLOCK_TILES)).to(tl.int64)
        mask = (tile[:, None] < v_tiles) & is_row[None, :]
        values = tl.load(numbers_ptr + tile[:, None] * stride + row[None, :], mask, other=empty)
        is_after = tile[:, None] * TILE_V > label[None, :]
        values_until = tl.where(is_after, empty, values)
        values_after = tl.where(is_after, values, empty)
        if IS_MAX:
            until = tl.maximum(until, tl.max(values_until, axis=0))
            after = tl.maximum(after, tl.max(values_after, axis=0))
        else:
            until += tl.sum(values_until, axis=0)
            after += tl.sum(values_after, axis=0)
    return until, after


@triton.jit(do_not_specialize=["start", "rows", "only_on_overflow"])
def _halves_kernel(
    partial_ptr,  # (T, SUMS, C)
    labels_ptr,  # (C,) from the shard's first class, outside its classes where another's
    halves_ptr,  # (2, SUMS, C)
    overflow_ptr,  # () int32, start + 1 of the chunk that overflowed last
    counts_ptr,  # (1,) supervised tokens
    start,  # of them, where the chunk begins
    only_on_overflow,  # 1: return unless the chunk has overflowed
    rows,
    v_tiles,
    SUMS: tl.constexpr,
    TILE_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """One program per few rows."""
    if only_on_overflow != 0:  # noqa: SIM102 - the second is loaded only then
        if tl.load(overflow_ptr) != start + 1:
            return
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < tl.minimum(tl.load(counts_ptr) - start, rows)
    label = tl.load(labels_ptr + row, mask=is_row, other=0)
    for number in tl.static_range(SUMS):  # pyright: ignore[reportGeneralTypeIssues]
        # sums, maxima, moments
        until, after = _until_and_after(  # pyright: ignore[reportGeneralTypeIssues]
            partial_ptr + number * rows,
            label,
            row,
            is_row,
            v_tiles,
            SUMS * rows,
            number == 1,
            TILE_V,
            BLOCK_TILES,
        )
        tl.store(halves_ptr + number * rows + row, until, mask=is_row)
        tl.store(halves_ptr + (SUMS + number) * rows + row, after, mask=is_row)


def halves(
    partial: Tensor,  # (T, SUMS, C) float32
    labels: Tensor,  # (C,)
    overflow: Tensor,
    counts: Tensor,
    *,
    start: int,
    only_on_overflow: int,
    tile_v: int,
) -> Tensor:
    """Return (2, SUMS, C) the numbers of tiles until and after each label's; with
    ``only_on_overflow``, those of a chunk that has not overflowed mean nothing.
    """
    v_tiles, sums, rows = partial.shape
    result = partial.new_empty(2, sums, rows)
    with torch.cuda.device_of(partial):
        _halves_kernel[(triton.cdiv(rows, BLOCKS["BLOCK_ROWS"]),)](
            partial,
            labels,
            result,
            overflow,
            counts,
            start,
            only_on_overflow,
            rows,
            v_tiles,
            SUMS=sums,  # pyright: ignore[reportArgumentType]
            TILE_V=tile_v,  # pyright: ignore[reportArgumentType]
            **BLOCKS,
        )
    return result
