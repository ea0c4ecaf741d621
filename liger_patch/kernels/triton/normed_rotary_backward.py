"""Triton form of the backward pass of ``normed_rotary``. P: programs, D: features of a head.

Tiles are those of the forward pass, and a row of upstream gradients is loaded twice as a row is
there. Extra memory: (P, 2, D) floats of the weights' gradients, summed in a fixed order. PROGRAMS
and STAGES are those of ``rms_norm``.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.backend import processors, shared_bytes
from liger_patch.kernels.rows import contiguous_features
from liger_patch.kernels.triton.normed_rotary import (
    NORM_DTYPES,
    WARPS,
    blocks_of,
    columns_of,
    place_of,
    rows_of,
    scale_of,
    table_of,
    tiles_of,
)
from liger_patch.kernels.triton.rms_norm import (
    PROGRAMS,
    SCRATCH_BYTES,
    STAGES,
    STAGES_BYTES,
    TILE,
    sum_parts,
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
    column, partner, is_column, is_turned = columns_of(size, half, BLOCK_SIZE)  # pyright: ignore
    scale = scale_of(weight_ptr, offset, column, is_column, BLOCK_SIZE)
    if parts_ptr is not None:
        dweight = tl.zeros((BLOCK_TOKENS, BLOCK_HEADS, BLOCK_SIZE), dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        batch, token, head, is_inside, row = place_of(  # pyright: ignore
            tile, tokens, num_heads, BLOCK_TOKENS, BLOCK_HEADS
        )
        mask = is_inside[:, :, None] & is_column[None, None, :]
        turned_mask = is_inside[:, :, None] & is_turned[None, None, :]
        upstream_ptr = dy_ptr + batch * dy_batch_stride
        dy = rows_of(upstream_ptr, dy_head_stride, dy_token_stride, token, head, column, mask)
        across = rows_of(
            upstream_ptr, dy_head_stride, dy_token_stride, token, head, partner, turned_mask
        )
        input_ptr = x_ptr + batch * x_batch_stride
        x = rows_of(input_ptr, x_head_stride, x_token_stride, token, head, column, mask)
        cos_row, sin_row = cos_ptr + batch * cos_batch_stride, sin_ptr + batch * sin_batch_stride
        cos = table_of(cos_row, cos_token_stride, token, tokens, column, is_turned)
        sin = table_of(sin_row, sin_token_stride, token, tokens, partner, is_turned)
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
        dq_out_ptr, dq_out_batch_stride, dq_out_head_stride, dq_out_token_stride, q_ptr,
        q_batch_stride, q_head_stride, q_token_stride, q_weight_ptr, q_rstd_ptr, dq_ptr, parts_ptr,
        cos_ptr, cos_batch_stride, cos_token_stride, sin_ptr, sin_batch_stride, sin_token_stride,
        q_tiles, tokens, q_num_heads, size, half, offset, NORM_DTYPE, BLOCK_Q_TOKENS,
        BLOCK_Q_HEADS, BLOCK_SIZE, STAGES, PLACE=0,
    )  # fmt: skip
    _turn_back(
        dk_out_ptr, dk_out_batch_stride, dk_out_head_stride, dk_out_token_stride, k_ptr,
        k_batch_stride, k_head_stride, k_token_stride, k_weight_ptr, k_rstd_ptr, dk_ptr, parts_ptr,
        cos_ptr, cos_batch_stride, cos_token_stride, sin_ptr, sin_batch_stride, sin_token_stride,
        k_tiles, tokens, k_num_heads, size, half, offset, NORM_DTYPE, BLOCK_K_TOKENS,
        BLOCK_K_HEADS, BLOCK_SIZE, STAGES, PLACE=1,
    )  # fmt: skip


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
    dq_out, dk_out = (contiguous_features(x) for x in upstream)
    q, k = (contiguous_features(x) for x in inputs)
    cos, sin = contiguous_features(cos), contiguous_features(sin)
    tokens, size = q.shape[2:]
    blocks = blocks_of(q.shape[1], k.shape[1], size)
    q_tiles, k_tiles = tiles_of(q, k, blocks)
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
    tile_bytes = TILE * (x_bytes + 2 * dy_bytes) + tables
    fitting = 1 + min(STAGES_BYTES, most_bytes - SCRATCH_BYTES) // tile_bytes
    return STAGES if fitting >= STAGES and turned % 32 == 0 else 1
