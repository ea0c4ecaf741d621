"""Triton form of norms with a rotary embedding behind them. The formulas are in ``normed_rotary``.
P: programs.

A tile is some attention heads of some tokens, whole rows. A row is loaded twice: once more with its
halves exchanged, which the cache serves; so sums over a row have the order that they have in
``rms_norm``. Extra memory of the backward pass: (P, 2, D) floats of the weights' gradients, summed
in a fixed order. TILE, PROGRAMS and STAGES are those of ``rms_norm``.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.backend import processors, shared_bytes
from liger_patch.kernels.triton.rms_norm import (
    PROGRAMS,
    SCRATCH_BYTES,
    STAGES,
    STAGES_BYTES,
    TILE,
    sum_parts,
)

MAX_BLOCK_HEADS = 8  # of a tile: they share the angles that it loads
WARPS = 4
NORM_DTYPES = {  # of the norms' results
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@triton.jit
def _place_of(tile, tokens, num_heads, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
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
def _columns(size, half, BLOCK_SIZE: tl.constexpr):
    """Return the features, those that they are turned with, and which of both there are."""
    column = tl.arange(0, BLOCK_SIZE)
    partner = tl.where(column < half, column + half, column - half)
    return column, partner, column < size, column < 2 * half


@triton.jit
def _scale(weight_ptr, offset, column, is_column, BLOCK_SIZE: tl.constexpr):
    scale = tl.full((BLOCK_SIZE,), 1.0, dtype=tl.float32)
    if weight_ptr is not None:
        scale = offset + tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    return scale[None, None, :]


@triton.jit
def _table(table_ptr, stride, token, tokens, column, is_turned):
    """Return (BLOCK_TOKENS, 1, BLOCK_SIZE) values of cos or sin."""
    offsets = token * stride + column[None, :]
    mask = (token < tokens) & is_turned[None, :]
    return tl.load(table_ptr + offsets, mask=mask, other=0.0).to(tl.float32)[:, None, :]


@triton.jit
def _rows(x_ptr, head_stride, token_stride, token, head, column, mask):
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
    batch, token, head, is_inside, row = _place_of(  # pyright: ignore
        tile, tokens, num_heads, BLOCK_TOKENS, BLOCK_HEADS
    )
    column, partner, is_column, is_turned = _columns(size, half, BLOCK_SIZE)
    mask = is_inside[:, :, None] & is_column[None, None, :]
    turned_mask = is_inside[:, :, None] & is_turned[None, None, :]
    x_ptr += batch * x_batch_stride
    x = _rows(x_ptr, x_head_stride, x_token_stride, token, head, column, mask)
    across = _rows(x_ptr, x_head_stride, x_token_stride, token, head, partner, turned_mask)
    cos_ptr += batch * cos_batch_stride
    sin_ptr += batch * sin_batch_stride
    cos = _table(cos_ptr, cos_token_stride, token, tokens, column, is_turned)
    sin = _table(sin_ptr, sin_token_stride, token, tokens, column, is_turned)
    sin = tl.where((column < half)[None, None, :], -sin, sin)
    rstd = tl.rsqrt(tl.sum(x * x, axis=2) / size + eps)
    normed, across = x * rstd[:, :, None], across * rstd[:, :, None]
    if weight_ptr is not None:
        normed *= _scale(weight_ptr, offset, column, is_column, BLOCK_SIZE)
        across *= _scale(weight_ptr, offset, partner, is_turned, BLOCK_SIZE)
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
            q_ptr,
            q_batch_stride,
            q_head_stride,
            q_token_stride,
            q_weight_ptr,
            q_out_ptr,
            q_rstd_ptr,
            cos_ptr,
            cos_batch_stride,
            cos_token_stride,
            sin_ptr,
            sin_batch_stride,
            sin_token_stride,
            tile,
            tokens,
            q_num_heads,
            size,
            half,
            eps,
            offset,
            NORM_DTYPE,
            BLOCK_Q_TOKENS,
            BLOCK_Q_HEADS,
            BLOCK_SIZE,
        )
    else:
        _turn_normed(
            k_ptr,
            k_batch_stride,
            k_head_stride,
            k_token_stride,
            k_weight_ptr,
            k_out_ptr,
            k_rstd_ptr,
            cos_ptr,
            cos_batch_stride,
            cos_token_stride,
            sin_ptr,
            sin_batch_stride,
            sin_token_stride,
            tile - q_tiles,
            tokens,
            k_num_heads,
            size,
            half,
            eps,
            offset,
            NORM_DTYPE,
            BLOCK_K_TOKENS,
            BLOCK_K_HEADS,
            BLOCK_SIZE,
        )


@triton.jit
def _turn_back(
    dy_ptr,
    dy_batch_stride,
    dy_head_stride,
    dy_token_stride,
    x_ptr,
    x_batch_stride,
    x_head_stride,
    x_token_stride,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    parts_ptr,
    cos_ptr,
    cos_batch_stride,
    cos_token_stride,
    sin_ptr,
    sin_batch_stride,
    sin_token_stride,
    tiles,
    tokens,
    num_heads,
    size,
    half,
    offset,
    NORM_DTYPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
    PLACE: tl.constexpr,  # of the weight's gradient in parts
):
    """Write dx of a program's tiles of queries or keys, and its part of dweight."""
    column, partner, is_column, is_turned = _columns(size, half, BLOCK_SIZE)  # pyright: ignore
    scale = _scale(weight_ptr, offset, column, is_column, BLOCK_SIZE)
    if parts_ptr is not None:
        dweight = tl.zeros((BLOCK_TOKENS, BLOCK_HEADS, BLOCK_SIZE), dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        batch, token, head, is_inside, row = _place_of(  # pyright: ignore
            tile, tokens, num_heads, BLOCK_TOKENS, BLOCK_HEADS
        )
        mask = is_inside[:, :, None] & is_column[None, None, :]
        turned_mask = is_inside[:, :, None] & is_turned[None, None, :]
        upstream_ptr = dy_ptr + batch * dy_batch_stride
        dy = _rows(upstream_ptr, dy_head_stride, dy_token_stride, token, head, column, mask)
        across = _rows(
            upstream_ptr, dy_head_stride, dy_token_stride, token, head, partner, turned_mask
        )
        input_ptr = x_ptr + batch * x_batch_stride
        x = _rows(input_ptr, x_head_stride, x_token_stride, token, head, column, mask)
        cos_row, sin_row = cos_ptr + batch * cos_batch_stride, sin_ptr + batch * sin_batch_stride
        cos = _table(cos_row, cos_token_stride, token, tokens, column, is_turned)
        sin = _table(sin_row, sin_token_stride, token, tokens, partner, is_turned)
        sin = tl.where((column < half)[None, None, :], sin, -sin)
        rstd = tl.load(rstd_ptr + row, mask=is_inside, other=0.0)[:, :, None]
        upstream = tl.where(is_turned[None, None, :], dy * cos + across * sin, dy)
        # as a rotary embedding of its own would write it
        upstream = upstream.to(NORM_DTYPE).to(tl.float32)
        normed = x * rstd
        dnormed = upstream * scale
        if parts_ptr is not None:
            dweight += upstream * normed
        mean = (tl.sum(dnormed * normed, axis=2) / size)[:, :, None]
        dx = (dnormed - normed * mean) * rstd
        tl.store(dx_ptr + row[:, :, None] * size + column[None, None, :], dx, mask=mask)
    if parts_ptr is not None:
        part = tl.sum(tl.reshape(dweight, (BLOCK_TOKENS * BLOCK_HEADS, BLOCK_SIZE)), axis=0)
        parts_ptr += (2 * tl.program_id(0) + PLACE) * size
        tl.store(parts_ptr + column, part, mask=is_column)


@triton.jit
def _turn_normed_backward_kernel(
    dq_out_ptr,  # (B, num_heads, T, D)
    dq_out_batch_stride,
    dq_out_head_stride,
    dq_out_token_stride,
    dk_out_ptr,  # (B, other num_heads, T, D)
    dk_out_batch_stride,
    dk_out_head_stride,
    dk_out_token_stride,
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
    q_rstd_ptr,  # (B, T, num_heads)
    k_rstd_ptr,
    dq_ptr,  # (B, T, num_heads, D) contiguous
    dk_ptr,
    parts_ptr,  # (P, 2, D) or None
    cos_ptr,  # (B or 1, T, R)
    cos_batch_stride,
    cos_token_stride,
    sin_ptr,
    sin_batch_stride,
    sin_token_stride,
    q_tiles,
    k_tiles,
    tokens,
    q_num_heads,
    k_num_heads,
    size,
    half,  # R / 2
    offset,
    NORM_DTYPE: tl.constexpr,
    BLOCK_Q_TOKENS: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_TOKENS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of queries per program at a time, a grid apart; then so of keys."""
    _turn_back(
        dq_out_ptr,
        dq_out_batch_stride,
        dq_out_head_stride,
        dq_out_token_stride,
        q_ptr,
        q_batch_stride,
        q_head_stride,
        q_token_stride,
        q_weight_ptr,
        q_rstd_ptr,
        dq_ptr,
        parts_ptr,
        cos_ptr,
        cos_batch_stride,
        cos_token_stride,
        sin_ptr,
        sin_batch_stride,
        sin_token_stride,
        q_tiles,
        tokens,
        q_num_heads,
        size,
        half,
        offset,
        NORM_DTYPE,
        BLOCK_Q_TOKENS,
        BLOCK_Q_HEADS,
        BLOCK_SIZE,
        STAGES,
        PLACE=0,
    )
    _turn_back(
        dk_out_ptr,
        dk_out_batch_stride,
        dk_out_head_stride,
        dk_out_token_stride,
        k_ptr,
        k_batch_stride,
        k_head_stride,
        k_token_stride,
        k_weight_ptr,
        k_rstd_ptr,
        dk_ptr,
        parts_ptr,
        cos_ptr,
        cos_batch_stride,
        cos_token_stride,
        sin_ptr,
        sin_batch_stride,
        sin_token_stride,
        k_tiles,
        tokens,
        k_num_heads,
        size,
        half,
        offset,
        NORM_DTYPE,
        BLOCK_K_TOKENS,
        BLOCK_K_HEADS,
        BLOCK_SIZE,
        STAGES,
        PLACE=1,
    )


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
    q, k = (_contiguous_features(x) for x in inputs)
    cos, sin = _contiguous_features(cos), _contiguous_features(sin)
    tokens, size = q.shape[2:]
    blocks = tile(q.shape[1], k.shape[1], size)
    q_tiles, k_tiles = _tiles(q, k, blocks)
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


def normed_rotary_backward(
    upstream: tuple[Tensor, Tensor],  # (B, num_heads, T, D) each
    inputs: tuple[Tensor, Tensor],  # (B, num_heads, T, D) each
    weights: tuple[Tensor | None, Tensor | None],  # (D,) each
    cos: Tensor,  # (B or 1, T, R)
    sin: Tensor,  # (B or 1, T, R)
    rstds: tuple[Tensor, Tensor],  # (B, T, num_heads) float32, contiguous
    offset: float,
    norm_dtype: torch.dtype,
    gradients: tuple[Tensor, Tensor],  # of the inputs' shapes, (B, T, num_heads, D) in memory
    dweights: Tensor | None,  # (2, D) contiguous
) -> None:
    """Write the gradients of queries and keys and, where there are some, of both weights."""
    dq_out, dk_out = (_contiguous_features(x) for x in upstream)
    q, k = (_contiguous_features(x) for x in inputs)
    cos, sin = _contiguous_features(cos), _contiguous_features(sin)
    tokens, size = q.shape[2:]
    blocks = tile(q.shape[1], k.shape[1], size)
    q_tiles, k_tiles = _tiles(q, k, blocks)
    programs = min(max(q_tiles, k_tiles), PROGRAMS * processors(q.device))
    parts = None
    if dweights is not None:
        parts = torch.empty(programs, 2, size, dtype=torch.float32, device=q.device)
    block_tokens = max(blocks["BLOCK_Q_TOKENS"], blocks["BLOCK_K_TOKENS"])
    itemsizes = (q.element_size(), dq_out.element_size(), cos.element_size())
    loads = (cos.shape[-1], blocks["BLOCK_SIZE"], block_tokens, *itemsizes, shared_bytes(q.device))
    with torch.cuda.device_of(q):
        if programs:
            _turn_normed_backward_kernel[(programs,)](
                dq_out,
                dq_out.stride(0),
                dq_out.stride(1),
                dq_out.stride(2),
                dk_out,
                dk_out.stride(0),
                dk_out.stride(1),
                dk_out.stride(2),
                q,
                q.stride(0),
                q.stride(1),
                q.stride(2),
                k,
                k.stride(0),
                k.stride(1),
                k.stride(2),
                *weights,
                *rstds,
                *gradients,
                parts,
                cos,
                cos.stride(0) if len(cos) > 1 else 0,
                cos.stride(1),
                sin,
                sin.stride(0) if len(sin) > 1 else 0,
                sin.stride(1),
                q_tiles,
                k_tiles,
                tokens,
                q.shape[1],
                k.shape[1],
                size,
                cos.shape[-1] // 2,
                offset,
                NORM_DTYPE=NORM_DTYPES[norm_dtype],
                **blocks,
                STAGES=stages(*loads),
                num_warps=WARPS,  # pyright: ignore[reportCallIssue]
            )
    if dweights is not None and parts is not None:
        sum_parts(parts.view(programs, 2 * size), dweights.view(-1))


def _contiguous_features(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _tiles(q: Tensor, k: Tensor, blocks: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of tiles of queries and of keys."""

    def tiles(x: Tensor, name: str) -> int:
        batch, num_heads, tokens, _ = x.shape
        token_blocks = -(-tokens // blocks[f"BLOCK_{name}_TOKENS"])
        return batch * token_blocks * -(-num_heads // blocks[f"BLOCK_{name}_HEADS"])

    return tiles(q, "Q"), tiles(k, "K")


@functools.cache
def tile(q_num_heads: int, k_num_heads: int, size: int) -> dict[str, Any]:
    """Return constants of the kernels for attention heads of this number and size."""
    block_size: Any = triton.next_power_of_2(size)
    blocks = {"BLOCK_SIZE": block_size}
    for name, num_heads in (("Q", q_num_heads), ("K", k_num_heads)):
        heads: Any = min(MAX_BLOCK_HEADS, triton.next_power_of_2(max(1, num_heads)))
        blocks[f"BLOCK_{name}_HEADS"] = heads
        blocks[f"BLOCK_{name}_TOKENS"] = max(1, TILE // (heads * block_size))
    return blocks


@functools.cache
def stages(
    turned: int,
    block_size: int,
    block_tokens: int,
    x_bytes: int,
    dy_bytes: int,
    table_bytes: int,
    most_bytes: int,
) -> int:
    """Return how many iterations of the backward kernel have loads on their way, at most.

    Args:
        turned: R. Loads of exchanged halves are narrow where these are no multiple of 16 features.
        block_size, block_tokens: columns and tokens of a tile.
        x_bytes, dy_bytes, table_bytes: of an element of the inputs, of their gradients, of cos.
        most_bytes: of the shared memory that a program can have.
    """
    tables = 2 * block_tokens * block_size * table_bytes
    tile_bytes = max(TILE, block_size) * (x_bytes + 2 * dy_bytes) + tables
    fitting = 1 + min(STAGES_BYTES, most_bytes - SCRATCH_BYTES) // tile_bytes
    return STAGES if fitting >= STAGES and turned % 32 == 0 else 1
