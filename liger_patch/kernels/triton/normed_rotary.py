"""Triton form of norms with a rotary embedding behind them. The formulas are in ``normed_rotary``.

A tile is some attention heads of some tokens, whole rows. A row is loaded twice: once more with its
halves exchanged, which the cache serves; so sums over a row have the order that they have in
``rms_norm``. Extra memory: none. TILE is that of ``rms_norm``.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.rows import contiguous_features
from liger_patch.kernels.triton.rms_norm import TILE

MAX_BLOCK_HEADS = 8  # of a tile: they share the angles that it loads
WARPS = 4
NORM_DTYPES = {  # of the norms' results
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@triton.jit
def place_of(tile, tokens, num_heads, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Return a tile's sequence, its tokens (BLOCK_TOKENS, 1) and attention heads (1, BLOCK_HEADS),
    which of them there are, and their rows where tokens are in front of heads.
    """
    head_blocks, token_blocks = tl.cdiv(num_heads, BLOCK_HEADS), tl.cdiv(tokens, BLOCK_TOKENS)
    block = tile // head_blocks
    batch = (block // token_blocks).to(tl.int64)
    token = (block % token_blocks).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    head = (tile % head_blocks).to(tl.int64) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    token, head = token[:, None], head[None, :]
    is_inside = (token < tokens) & (head < num_heads)
    return batch, token, head, is_inside, (batch * tokens + token) * num_heads + head


@triton.jit
def columns_of(size, half, BLOCK_SIZE: tl.constexpr):
    """Return the features, those that they are turned with, and which of both there are."""
    column = tl.arange(0, BLOCK_SIZE)
    partner = tl.where(column < half, column + half, column - half)
    return column, partner, column < size, column < 2 * half


@triton.jit
def scale_of(weight_ptr, offset, column, is_column, BLOCK_SIZE: tl.constexpr):
    """Return (1, 1, BLOCK_SIZE) factors of a norm's features."""
    scale = tl.full((BLOCK_SIZE,), 1.0, dtype=tl.float32)
    if weight_ptr is not None:
        scale = offset + tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    return scale[None, None, :]


@triton.jit
def table_of(table_ptr, stride, token, tokens, column, is_turned):
    """Return (BLOCK_TOKENS, 1, BLOCK_SIZE) values of cos or sin."""
    offsets = token * stride + column[None, :]
    mask = (token < tokens) & is_turned[None, :]
    return tl.load(table_ptr + offsets, mask=mask, other=0.0).to(tl.float32)[:, None, :]


@triton.jit
def rows_of(x_ptr, head_stride, token_stride, token, head, column, mask):
    """Return (BLOCK_TOKENS, BLOCK_HEADS, BLOCK_SIZE) values of one sequence."""
    row = token * token_stride + head * head_stride
    return tl.load(x_ptr + row[:, :, None] + column[None, None, :], mask=mask, other=0.0).to(
        tl.float32
    )


@triton.jit
def _turn_normed(
    x_ptr,
    x_batch_stride,
    x_head_stride,
    x_token_stride,
    weight_ptr,
    out_ptr,
    rstd_ptr,
    cos_ptr,
    cos_batch_stride,
    cos_token_stride,
    sin_ptr,
    sin_batch_stride,
    sin_token_stride,
    tile,
    tokens,
    num_heads,
    size,
    half,
    eps,
    offset,
    NORM_DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Norm and turn a tile of queries or keys."""
    batch, token, head, is_inside, row = place_of(  # pyright: ignore
        tile, tokens, num_heads, BLOCK_TOKENS, BLOCK_HEADS
    )
    column, partner, is_column, is_turned = columns_of(size, half, BLOCK_SIZE)
    mask = is_inside[:, :, None] & is_column[None, None, :]
    turned_mask = is_inside[:, :, None] & is_turned[None, None, :]
    x_ptr += batch * x_batch_stride
    x = rows_of(x_ptr, x_head_stride, x_token_stride, token, head, column, mask)
    across = rows_of(x_ptr, x_head_stride, x_token_stride, token, head, partner, turned_mask)
    cos_ptr += batch * cos_batch_stride
    sin_ptr += batch * sin_batch_stride
    cos = table_of(cos_ptr, cos_token_stride, token, tokens, column, is_turned)
    sin = table_of(sin_ptr, sin_token_stride, token, tokens, column, is_turned)
    sin = tl.where((column < half)[None, None, :], -sin, sin)
    rstd = tl.rsqrt(tl.sum(x * x, axis=2) / size + eps)
    normed, across = x * rstd[:, :, None], across * rstd[:, :, None]
    if weight_ptr is not None:
        normed *= scale_of(weight_ptr, offset, column, is_column, BLOCK_SIZE)
        across *= scale_of(weight_ptr, offset, partner, is_turned, BLOCK_SIZE)
    # as a norm of its own would write it
    normed, across = normed.to(NORM_DTYPE).to(tl.float32), across.to(NORM_DTYPE).to(tl.float32)
    y = tl.where(is_turned[None, None, :], normed * cos + across * sin, normed)
    tl.store(out_ptr + row[:, :, None] * size + column[None, None, :], y, mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=is_inside)


@triton.jit
def _turn_normed_kernel(
    q_ptr,  # (B, num_heads, T, D)
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    k_ptr,  # (B, other num_heads, T, D)
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    q_weight_ptr,  # (D,) or None
    k_weight_ptr,
    q_out_ptr,  # (B, T, num_heads, D) contiguous
    k_out_ptr,
    q_rstd_ptr,  # (B, T, num_heads)
    k_rstd_ptr,
    cos_ptr,  # (B or 1, T, R)
    cos_batch_stride,
    cos_token_stride,
    sin_ptr,
    sin_batch_stride,
    sin_token_stride,
    q_tiles,
    tokens,
    q_num_heads,
    k_num_heads,
    size,
    half,  # R / 2
    eps,
    offset,
    NORM_DTYPE: tl.constexpr,
    BLOCK_Q_TOKENS: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_TOKENS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program per tile: those of the queries, then those of the keys."""
    tile = tl.program_id(0)
    if tile < q_tiles:
        _turn_normed(
            q_ptr, q_batch_stride, q_head_stride, q_token_stride, q_weight_ptr, q_out_ptr,
            q_rstd_ptr, cos_ptr, cos_batch_stride, cos_token_stride, sin_ptr, sin_batch_stride,
            sin_token_stride, tile, tokens, q_num_heads, size, half, eps, offset, NORM_DTYPE,
            BLOCK_Q_TOKENS, BLOCK_Q_HEADS, BLOCK_SIZE,
        )  # fmt: skip
    else:
        _turn_normed(
            k_ptr, k_batch_stride, k_head_stride, k_token_stride, k_weight_ptr, k_out_ptr,
            k_rstd_ptr, cos_ptr, cos_batch_stride, cos_token_stride, sin_ptr, sin_batch_stride,
            sin_token_stride, tile - q_tiles, tokens, k_num_heads, size, half, eps, offset,
            NORM_DTYPE, BLOCK_K_TOKENS, BLOCK_K_HEADS, BLOCK_SIZE,
        )  # fmt: skip


def normed_rotary(
    inputs: tuple[Tensor, Tensor],  # (B, num_heads, T, D) each
    weights: tuple[Tensor | None, Tensor | None],  # (D,) each
    cos: Tensor,  # (B or 1, T, R)
    sin: Tensor,  # (B or 1, T, R)
    eps: float,
    offset: float,
    norm_dtype: torch.dtype,
    outputs: tuple[Tensor, Tensor],  # of the inputs' shapes, (B, T, num_heads, D) in memory
    rstds: tuple[Tensor, Tensor],  # (B, T, num_heads) float32, contiguous
) -> None:
    """Write the normed and turned queries and keys, and 1 / rms of each row."""
    q, k = (contiguous_features(x) for x in inputs)
    cos, sin = contiguous_features(cos), contiguous_features(sin)
    tokens, size = q.shape[2:]
    blocks = blocks_of(q.shape[1], k.shape[1], size)
    q_tiles, k_tiles = tiles_of(q, k, blocks)
    if not q_tiles + k_tiles:
        return
    with torch.cuda.device_of(q):
        _turn_normed_kernel[(q_tiles + k_tiles,)](
            q,
            q.stride(0),
            q.stride(1),
            q.stride(2),
            k,
            k.stride(0),
            k.stride(1),
            k.stride(2),
            *weights,
            *outputs,
            *rstds,
            cos,
            cos.stride(0) if len(cos) > 1 else 0,
            cos.stride(1),
            sin,
            sin.stride(0) if len(sin) > 1 else 0,
            sin.stride(1),
            q_tiles,
            tokens,
            q.shape[1],
            k.shape[1],
            size,
            cos.shape[-1] // 2,
            eps,
            offset,
            NORM_DTYPE=NORM_DTYPES[norm_dtype],
            **blocks,
            num_warps=WARPS,  # pyright: ignore[reportCallIssue]
        )


def tiles_of(q: Tensor, k: Tensor, blocks: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of tiles of queries and of keys."""

    def tiles(x: Tensor, name: str) -> int:
        batch, num_heads, tokens, _ = x.shape
        token_blocks = -(-tokens // blocks[f"BLOCK_{name}_TOKENS"])
        return batch * token_blocks * -(-num_heads // blocks[f"BLOCK_{name}_HEADS"])

    return tiles(q, "Q"), tiles(k, "K")


@functools.cache
def blocks_of(q_num_heads: int, k_num_heads: int, size: int) -> dict[str, Any]:
    """Return constants of the kernels for attention heads of this number and size."""
    block_size: Any = triton.next_power_of_2(size)
    blocks = {"BLOCK_SIZE": block_size}
    for name, num_heads in (("Q", q_num_heads), ("K", k_num_heads)):
        most = min(MAX_BLOCK_HEADS, TILE // block_size)
        heads: Any = min(most, triton.next_power_of_2(max(1, num_heads)))
        blocks[f"BLOCK_{name}_HEADS"] = heads
        blocks[f"BLOCK_{name}_TOKENS"] = TILE // (heads * block_size)
    return blocks
