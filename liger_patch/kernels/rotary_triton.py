"""Triton form of the rotary embedding. The formulas are in ``rotary``. Extra memory: none."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK_HEADS = 8  # that a program holds at a time
WARPS = 4


@triton.jit
def _turn(
    x_ptr,
    x_head_stride,
    out_ptr,
    out_head_stride,
    cos_ptr,
    sin_ptr,
    heads,
    size,
    turned,
    BACKWARD: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """The heads of one token; features are contiguous."""
    half = turned // 2
    feature = tl.arange(0, BLOCK_HALF)
    inside = feature < half
    cos1 = tl.load(cos_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + half + feature, mask=inside, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + half + feature, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        across1, across2 = sin2, -sin1
    else:
        across1, across2 = -sin1, sin2
    for start in range(0, heads, BLOCK_HEADS):
        head = (start + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
        mask = (head < heads)[:, None] & inside[None, :]
        x_row = x_ptr + head[:, None] * x_head_stride
        out_row = out_ptr + head[:, None] * out_head_stride
        x1 = tl.load(x_row + feature[None, :], mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_row + half + feature[None, :], mask=mask, other=0.0).to(tl.float32)
        y1 = x1 * cos1[None, :] + x2 * across1[None, :]
        y2 = x2 * cos2[None, :] + x1 * across2[None, :]
        tl.store(out_row + feature[None, :], y1, mask=mask)
        tl.store(out_row + half + feature[None, :], y2, mask=mask)
        if BLOCK_REST > 0:
            rest = turned + tl.arange(0, BLOCK_REST)
            mask = (head < heads)[:, None] & (rest < size)[None, :]
            copied = tl.load(x_row + rest[None, :], mask=mask, other=0.0)
            tl.store(out_row + rest[None, :], copied, mask=mask)


@triton.jit
def _rotary_kernel(
    q_ptr,  # (B, heads, T, D)
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    k_ptr,  # (B, other heads, T, D)
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    q_out_ptr,  # (B, T, heads, D) contiguous
    k_out_ptr,
    cos_ptr,  # (B or 1, T, R)
    cos_batch_stride,
    cos_token_stride,
    sin_ptr,
    sin_batch_stride,
    sin_token_stride,
    tokens,
    q_heads,
    k_heads,
    size,
    turned,
    BACKWARD: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # 0 where all features are turned
):
    """One program per token."""
    place = tl.program_id(0).to(tl.int64)
    batch = place // tokens
    token = place % tokens
    cos_ptr += batch * cos_batch_stride + token * cos_token_stride
    sin_ptr += batch * sin_batch_stride + token * sin_token_stride
    _turn(
        q_ptr + batch * q_batch_stride + token * q_token_stride,
        q_head_stride,
        q_out_ptr + place * q_heads * size,
        size,
        cos_ptr,
        sin_ptr,
        q_heads,
        size,
        turned,
        BACKWARD,
        BLOCK_Q_HEADS,
        BLOCK_HALF,
        BLOCK_REST,
    )
    _turn(
        k_ptr + batch * k_batch_stride + token * k_token_stride,
        k_head_stride,
        k_out_ptr + place * k_heads * size,
        size,
        cos_ptr,
        sin_ptr,
        k_heads,
        size,
        turned,
        BACKWARD,
        BLOCK_K_HEADS,
        BLOCK_HALF,
        BLOCK_REST,
    )


def rotary(
    inputs: tuple[Tensor, Tensor],  # (B, heads, T, D) each
    cos: Tensor,  # (B or 1, T, R)
    sin: Tensor,  # (B or 1, T, R)
    outputs: tuple[Tensor, Tensor],  # of the inputs' shapes, (B, T, heads, D) in memory
    *,
    backward: bool,
) -> None:
    """Write the turned queries and keys; ``backward``: turned back."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs)
    batch, q_heads, tokens, size = q.shape
    turned = cos.shape[-1]
    if not batch * tokens:
        return
    constants: dict[str, Any] = {
        "BACKWARD": backward,
        "BLOCK_Q_HEADS": min(MAX_BLOCK_HEADS, triton.next_power_of_2(q_heads)),
        "BLOCK_K_HEADS": min(MAX_BLOCK_HEADS, triton.next_power_of_2(k.shape[1])),
        "BLOCK_HALF": triton.next_power_of_2(max(1, turned // 2)),
        "BLOCK_REST": triton.next_power_of_2(size - turned) if turned < size else 0,
    }
    cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
    with torch.cuda.device_of(q):
        _rotary_kernel[(batch * tokens,)](
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
            sin,
            sin.stride(0) if len(sin) > 1 else 0,
            sin.stride(1),
            tokens,
            q_heads,
            k.shape[1],
            size,
            turned,
            **constants,
            num_warps=WARPS,  # pyright: ignore[reportCallIssue]
        )
