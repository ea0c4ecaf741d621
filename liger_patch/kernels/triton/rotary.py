"""Triton form of the rotary embedding. The formulas are in ``rotary``. Extra memory: none."""

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.backend import contiguous_features
from liger_patch.kernels.triton.launch import launch

# The best of those tried on an H200, for attention heads of 64 to 256 features, of which all, a
# half or a quarter are turned
MAX_BLOCK_HEADS = 8  # that a program holds at a time
PAIRS = 1024  # that a program turns at a time, at least
WARPS, PARTLY_WARPS = 1, 2  # where all features are turned, and where some are copied, of one token


@triton.jit
def _turn(
    x_ptr,
    x_head_stride,
    x_token_stride,
    out_ptr,
    cos_ptr,
    cos_token_stride,
    cos_stride,
    sin_ptr,
    sin_token_stride,
    sin_stride,
    token,  # (BLOCK_TOKENS,)
    tokens,
    num_heads,
    size,
    turned,
    BACKWARD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Turn the attention heads of some tokens; features are contiguous."""
    pair = tl.arange(0, BLOCK_PAIRS)
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
        angle2 = pair
    else:
        first, second = pair, turned // 2 + pair
        angle2 = second
    # of the side that has halves: the results, and in the backward pass what is turned back
    if GROUPED:
        half1, half2 = pair, turned // 2 + pair
    else:
        half1, half2 = first, second
    if BACKWARD:
        first, second, out1, out2 = half1, half2, first, second
    else:
        out1, out2 = half1, half2
    token_mask = token < tokens
    has_angle = token_mask[:, None] & (pair < turned // 2)[None, :]
    cos_ptr += token[:, None] * cos_token_stride
    sin_ptr += token[:, None] * sin_token_stride
    cos1 = tl.load(cos_ptr + pair[None, :] * cos_stride, mask=has_angle, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + angle2[None, :] * cos_stride, mask=has_angle, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + pair[None, :] * sin_stride, mask=has_angle, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + angle2[None, :] * sin_stride, mask=has_angle, other=0.0).to(tl.float32)
    if BACKWARD:
        across1, across2 = sin2, -sin1
    else:
        across1, across2 = -sin1, sin2
    for start in range(0, num_heads, BLOCK_HEADS):
        index = (start + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
        is_inside = token_mask[:, None] & (index < num_heads)[None, :]
        x_row = x_ptr + token[:, None] * x_token_stride + index[None, :] * x_head_stride
        out_row = out_ptr + (token[:, None] * num_heads + index[None, :]) * size
        mask = is_inside[:, :, None] & (pair < turned // 2)[None, None, :]
        x1 = tl.load(x_row[:, :, None] + first[None, None, :], mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_row[:, :, None] + second[None, None, :], mask=mask, other=0.0).to(tl.float32)
        y1 = x1 * cos1[:, None, :] + x2 * across1[:, None, :]
        y2 = x2 * cos2[:, None, :] + x1 * across2[:, None, :]
        tl.store(out_row[:, :, None] + out1[None, None, :], y1, mask=mask)
        tl.store(out_row[:, :, None] + out2[None, None, :], y2, mask=mask)
        if BLOCK_REST > 0:
            rest = turned + tl.arange(0, BLOCK_REST)
            mask = is_inside[:, :, None] & (rest < size)[None, None, :]
            copied = tl.load(x_row[:, :, None] + rest[None, None, :], mask=mask, other=0.0)
            tl.store(out_row[:, :, None] + rest[None, None, :], copied, mask=mask)


@triton.jit
def _rotary_kernel(
    q_ptr,  # (B, num_heads, T, D)
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    k_ptr,  # (B, other num_heads or 0, T, D)
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    q_out_ptr,  # (B, T, num_heads, D) contiguous
    k_out_ptr,
    cos_ptr,  # (B or 1, T, R), of interleaved pairs (B or 1, T, R / 2)
    cos_batch_stride,
    cos_token_stride,
    cos_stride,
    sin_ptr,
    sin_batch_stride,
    sin_token_stride,
    sin_stride,
    tokens,
    q_num_heads,
    k_num_heads,
    size,
    turned,
    BACKWARD: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,  # 0 where there are no keys
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # 0 where all features are turned
):
    """One program per block of a sequence's tokens."""
    blocks = tl.cdiv(tokens, BLOCK_TOKENS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    token = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    cos_ptr += batch * cos_batch_stride
    sin_ptr += batch * sin_batch_stride
    _turn(
        q_ptr + batch * q_batch_stride,
        q_head_stride,
        q_token_stride,
        q_out_ptr + batch * tokens * q_num_heads * size,
        cos_ptr,
        cos_token_stride,
        cos_stride,
        sin_ptr,
        sin_token_stride,
        sin_stride,
        token,
        tokens,
        q_num_heads,
        size,
        turned,
        BACKWARD,
        INTERLEAVED,
        GROUPED,
        BLOCK_Q_HEADS,
        BLOCK_PAIRS,
        BLOCK_REST,
    )
    if BLOCK_K_HEADS > 0:
        _turn(
            k_ptr + batch * k_batch_stride,
            k_head_stride,
            k_token_stride,
            k_out_ptr + batch * tokens * k_num_heads * size,
            cos_ptr,
            cos_token_stride,
            cos_stride,
            sin_ptr,
            sin_token_stride,
            sin_stride,
            token,
            tokens,
            k_num_heads,
            size,
            turned,
            BACKWARD,
            INTERLEAVED,
            GROUPED,
            BLOCK_K_HEADS,
            BLOCK_PAIRS,
            BLOCK_REST,
        )


def rotary(
    inputs: tuple[Tensor, Tensor],  # (B, num_heads, T, D) each
    cos: Tensor,  # (B or 1, T, R), of interleaved pairs (B or 1, T, R / 2)
    sin: Tensor,  # as cos
    outputs: tuple[Tensor, Tensor],  # of the inputs' shapes, (B, T, num_heads, D) in memory
    *,
    interleaved: bool,
    grouped: bool,
    backward: bool,
) -> None:
    """Write the turned queries and keys; ``backward``: turned back; ``grouped``: of interleaved
    pairs, to halves.
    """
    q, k = contiguous_features(inputs[0]), contiguous_features(inputs[1])
    batch, q_num_heads, tokens, size = q.shape
    turned = cos.shape[-1] * (2 if interleaved else 1)
    if not batch * tokens:
        return
    blocks, num_warps = tile(q_num_heads, k.shape[1], size, turned)
    launch(
        _rotary_kernel,
        (batch * -(-tokens // blocks["BLOCK_TOKENS"]),),
        q,
        q.stride(0),
        q.stride(1),
        q.stride(2),
        k,
        k.stride(0),
        k.stride(1),
        k.stride(2),
        outputs[0],
        outputs[1],
        cos,
        cos.stride(0) if len(cos) > 1 else 0,
        cos.stride(1),
        cos.stride(2),
        sin,
        sin.stride(0) if len(sin) > 1 else 0,
        sin.stride(1),
        sin.stride(2),
        tokens,
        q_num_heads,
        k.shape[1],
        size,
        turned,
        BACKWARD=backward,
        INTERLEAVED=interleaved,
        GROUPED=grouped,
        **blocks,
        num_warps=num_warps,
    )


@functools.cache
def tile(q_num_heads: int, k_num_heads: int, size: int, turned: int) -> tuple[dict[str, Any], int]:
    """Return constants of the kernel for attention heads of this number and size, and a program's
    warps.
    """
    pairs: Any = triton.next_power_of_2(max(1, turned // 2))
    q_block: Any = min(MAX_BLOCK_HEADS, triton.next_power_of_2(max(1, q_num_heads)))
    k_block: Any = min(MAX_BLOCK_HEADS, triton.next_power_of_2(k_num_heads))
    tokens: Any = 1
    if turned == size:
        tokens = triton.next_power_of_2(-(-PAIRS // (max(q_block, k_block) * pairs)))
    return {
        "BLOCK_TOKENS": tokens,
        "BLOCK_Q_HEADS": q_block,
        "BLOCK_K_HEADS": k_block,
        "BLOCK_PAIRS": pairs,
        "BLOCK_REST": triton.next_power_of_2(size - turned) if turned < size else 0,
    }, WARPS if turned == size else PARTLY_WARPS
