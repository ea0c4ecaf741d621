"""Triton forms of what products in FP8 need: rows in e4m3 with one scale a row, and a weight's
bytes transposed.

    scale of a row = largest |x| / 448          number = x / scale, rounded to e4m3

Several matrices of the same rows may lie side by side in the result, with one scale for all; the
columns of each may be multiplied by factors first. N: rows, H and O: columns and rows of a weight.
Extra memory: none.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.triton.launch import launch

LARGEST: tl.constexpr = tl.constexpr(448.0)  # of e4m3
LEAST_SCALE: tl.constexpr = tl.constexpr(2.0**-100)  # so that its inverse is finite
MATRICES = 4  # side by side, of one launch
NARROW = 4096  # columns: up to here a block of 2048 was the fastest on an H100, behind it of 4096
BLOCK, WIDE_BLOCK = 2048, 4096  # columns of a step: 16 bytes a thread
WARP_COLUMNS = 256
TILE = 128  # bytes on both sides of a transposed tile
TILE_WARPS = 4


@triton.jit
def _scaled_columns(x_ptr, factors_ptr, column, columns):
    mask = column < columns
    x = tl.load(x_ptr + column, mask=mask, other=0.0).to(tl.float32)
    if factors_ptr is not None:
        x *= tl.load(factors_ptr + column, mask=mask, other=0.0)
    return x


@triton.jit
def _largest(x_ptr, factors_ptr, columns, BLOCK: tl.constexpr):
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        x = _scaled_columns(x_ptr, factors_ptr, start + tl.arange(0, BLOCK), columns)
        largest = tl.maximum(largest, tl.abs(x))
    return tl.max(largest, 0)


@triton.jit
def _store_numbers(out_ptr, x_ptr, factors_ptr, columns, inverse, BLOCK: tl.constexpr):
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = _scaled_columns(x_ptr, factors_ptr, column, columns)
        numbers = (x * inverse).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + column, numbers, mask=column < columns)


@triton.jit
def _quantize_rows_kernel(
    out_ptr,  # (N, sum of columns) e4m3
    scales_ptr,  # (N,)
    first_ptr,  # (N, first_columns)
    first_factors_ptr,  # (first_columns,), None: without
    second_ptr,  # None: fewer matrices
    second_factors_ptr,
    third_ptr,
    third_factors_ptr,
    fourth_ptr,
    fourth_factors_ptr,
    first_stride,
    second_stride,
    third_stride,
    fourth_stride,
    first_columns,
    second_columns,
    third_columns,
    fourth_columns,
    BLOCK: tl.constexpr,
):
    """One program per row: reads it twice, the second time from a cache."""
    row = tl.program_id(0).to(tl.int64)
    first_ptr += row * first_stride
    largest = _largest(first_ptr, first_factors_ptr, first_columns, BLOCK)
    if second_ptr is not None:
        second_ptr += row * second_stride
        found = _largest(second_ptr, second_factors_ptr, second_columns, BLOCK)
        largest = tl.maximum(largest, found)
    if third_ptr is not None:
        third_ptr += row * third_stride
        found = _largest(third_ptr, third_factors_ptr, third_columns, BLOCK)
        largest = tl.maximum(largest, found)
    if fourth_ptr is not None:
        fourth_ptr += row * fourth_stride
        found = _largest(fourth_ptr, fourth_factors_ptr, fourth_columns, BLOCK)
        largest = tl.maximum(largest, found)
    scale = tl.maximum(largest / LARGEST, LEAST_SCALE)
    tl.store(scales_ptr + row, scale)

    inverse = 1.0 / scale
    out_ptr += row * (first_columns + second_columns + third_columns + fourth_columns)
    _store_numbers(out_ptr, first_ptr, first_factors_ptr, first_columns, inverse, BLOCK)
    if second_ptr is not None:
        out_ptr += first_columns
        _store_numbers(out_ptr, second_ptr, second_factors_ptr, second_columns, inverse, BLOCK)
    if third_ptr is not None:
        out_ptr += second_columns
        _store_numbers(out_ptr, third_ptr, third_factors_ptr, third_columns, inverse, BLOCK)
    if fourth_ptr is not None:
        out_ptr += third_columns
        _store_numbers(out_ptr, fourth_ptr, fourth_factors_ptr, fourth_columns, inverse, BLOCK)


def quantize_rows(
    matrices: Sequence[Tensor],  # (N, columns of each), their columns contiguous; up to MATRICES
    factors: Sequence[Tensor | None],  # (columns of each,) float32
) -> tuple[Tensor, Tensor]:
    """Return the numbers (N, sum of columns) and their scales (N, 1), float32."""
    like, columns = matrices[0], [each.shape[1] for each in matrices]
    numbers = like.new_empty(len(like), sum(columns), dtype=torch.float8_e4m3fn)
    scales = like.new_empty(len(like), 1, dtype=torch.float32)
    block = BLOCK if max(columns) <= NARROW else WIDE_BLOCK
    missing = MATRICES - len(matrices)
    pairs: list[Any] = []
    for pair in zip(matrices, factors, strict=True):
        pairs += pair
    launch(
        _quantize_rows_kernel,
        (len(like),),
        numbers,
        scales,
        *pairs,
        *([None] * (2 * missing)),
        *(each.stride(0) for each in matrices),
        *([0] * missing),
        *columns,
        *([0] * missing),
        BLOCK=block,
        num_warps=block // WARP_COLUMNS,
    )
    return numbers, scales


@triton.jit
def _byte(word, place: tl.constexpr):
    return (word >> (8 * place)) & 255


@triton.jit
def _byte_of_each(first, second, third, fourth, place: tl.constexpr):
    """Return words whose four bytes are the same byte of four words."""
    low = _byte(first, place) | (_byte(second, place) << 8)
    return low | (_byte(third, place) << 16) | (_byte(fourth, place) << 24)


@triton.jit
def _transpose_kernel(
    words_ptr,  # (O, H / 4), four bytes each
    out_ptr,  # (H, O / 4)
    out_words,  # O / 4
    words,  # H / 4
    out_stride,
    TILE_WORDS: tl.constexpr,
):
    """A tile of 4 TILE_WORDS x 4 TILE_WORDS bytes per program, in words: the bytes of 4 x 4 are
    exchanged in registers.
    """
    out_word = tl.program_id(0) * TILE_WORDS + tl.arange(0, TILE_WORDS)
    word = tl.program_id(1) * TILE_WORDS + tl.arange(0, TILE_WORDS)
    mask = (out_word < out_words)[:, None] & (word < words)[None, :]
    row = out_word.to(tl.int64) * 4
    place = words_ptr + row[:, None] * words + word[None, :]
    first = tl.load(place, mask=mask, other=0)
    second = tl.load(place + words, mask=mask, other=0)
    third = tl.load(place + 2 * words, mask=mask, other=0)
    fourth = tl.load(place + 3 * words, mask=mask, other=0)

    mask = (word < words)[:, None] & (out_word < out_words)[None, :]
    out_row = word.to(tl.int64) * 4
    out = out_ptr + out_row[:, None] * out_stride + out_word[None, :]
    for k in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        exchanged = _byte_of_each(first, second, third, fourth, k)
        tl.store(out + k * out_stride, tl.trans(exchanged), mask=mask)


def transpose_(
    out: Tensor,  # (H, O) of one byte each, its columns contiguous
    numbers: Tensor,  # (O, H) of one byte each, contiguous
) -> None:
    """Write the numbers transposed. O, H and the stride of out are multiples of 4."""
    given, written = numbers.view(torch.int32), out.view(torch.int32)
    grid = triton.cdiv(len(numbers), TILE), triton.cdiv(numbers.shape[1], TILE)
    launch(
        _transpose_kernel,
        grid,
        given,
        written,
        written.shape[1],
        given.shape[1],
        written.stride(0),
        TILE_WORDS=TILE // 4,
        num_warps=TILE_WARPS,
    )
