"""Triton form of the causal convolution. The formulas and letters are in ``causal_conv``.

A program walks over rows of some channels. It holds the last tokens, which the next ones need too,
in registers: each row is read once, but for three at each program's boundary. The next two rows are
on their way while it computes.

Extra memory of the backward pass: the sums of each program, (P, W + 1, C) floats, summed in a fixed
order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.triton.gated import sigmoid
from liger_patch.kernels.triton.launch import launch

BLOCK_C, WARPS = 512, 4  # channels of a program: 8 bytes of 16 bits a thread
ROWS, BACKWARD_ROWS = 64, 128  # of a program; the second has sums to write


@triton.jit
def _weight(weight_ptr, channel, is_channel, behind, WIDTH: tl.constexpr):
    """Return the weights of the token so far behind, 0 where there are none."""
    place = channel * WIDTH + WIDTH - 1 - behind
    return tl.load(weight_ptr + place, mask=is_channel & (behind < WIDTH), other=0.0).to(tl.float32)


@triton.jit
def _row(ptr, stride, t, tokens, channel, is_channel):
    """Return one token's row, zeros where there is no such token."""
    mask = is_channel & (t >= 0) & (t < tokens)
    return tl.load(ptr + t * stride + channel, mask=mask, other=0.0)


@triton.jit
def _id(ids_ptr, t, tokens):
    return tl.load(ids_ptr + t, mask=(t >= 0) & (t < tokens), other=-1)


@triton.jit
def _causal_conv_kernel(
    x_ptr,  # (B, T, C)
    x_batch_stride,
    x_stride,
    weight_ptr,  # (C, W)
    bias_ptr,  # (C,), or None
    ids_ptr,  # (B, T), or None
    y_ptr,  # (B, T, C) contiguous
    tokens,
    channels,
    IS_SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program per rows and channels of a batch's row."""
    first, batch = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    x_ptr += batch * x_batch_stride
    y_ptr += batch * tokens * channels
    weight0 = _weight(weight_ptr, channel, is_channel, 0, WIDTH)
    weight1 = _weight(weight_ptr, channel, is_channel, 1, WIDTH)
    weight2 = _weight(weight_ptr, channel, is_channel, 2, WIDTH)
    weight3 = _weight(weight_ptr, channel, is_channel, 3, WIDTH)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    x1 = _row(x_ptr, x_stride, first - 1, tokens, channel, is_channel).to(tl.float32)
    x2 = _row(x_ptr, x_stride, first - 2, tokens, channel, is_channel).to(tl.float32)
    x3 = _row(x_ptr, x_stride, first - 3, tokens, channel, is_channel).to(tl.float32)
    next_x = _row(x_ptr, x_stride, first, tokens, channel, is_channel)
    later_x = _row(x_ptr, x_stride, first + 1, tokens, channel, is_channel)
    if ids_ptr is not None:
        ids_ptr += batch * tokens
    is_float32: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    for step in range(ROWS):
        t = first + step
        x0, next_x = next_x.to(tl.float32), later_x
        later_x = _row(x_ptr, x_stride, t + 2, tokens, channel, is_channel)
        if ids_ptr is not None:
            own = _id(ids_ptr, t, tokens)
            x1 = tl.where(_id(ids_ptr, t - 1, tokens) == own, x1, 0.0)
            x2 = tl.where(_id(ids_ptr, t - 2, tokens) == own, x2, 0.0)
            x3 = tl.where(_id(ids_ptr, t - 3, tokens) == own, x3, 0.0)
        p = bias + x0 * weight0 + x1 * weight1 + x2 * weight2 + x3 * weight3
        if IS_SILU:
            p *= sigmoid(p, is_float32)
        tl.store(y_ptr + t * channels + channel, p, mask=is_channel & (t < tokens))
        x1, x2, x3 = x0, x1, x2


@triton.jit
def _causal_conv_backward_kernel(
    dy_ptr,  # (B, T, C)
    dy_batch_stride,
    dy_stride,
    x_ptr,  # (B, T, C)
    x_batch_stride,
    x_stride,
    weight_ptr,  # (C, W)
    bias_ptr,  # (C,), or None
    ids_ptr,  # (B, T), or None
    dx_ptr,  # (B, T, C) contiguous
    sums_ptr,  # (P, 5, C): of the weights of the tokens 0 to 3 behind, and of the bias
    tokens,
    channels,
    IS_SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program per rows and channels of a batch's row. It goes three rows on, for dp."""
    first, batch = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(2).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    dy_ptr += batch * dy_batch_stride
    x_ptr += batch * x_batch_stride
    dx_ptr += batch * tokens * channels
    weight0 = _weight(weight_ptr, channel, is_channel, 0, WIDTH)
    weight1 = _weight(weight_ptr, channel, is_channel, 1, WIDTH)
    weight2 = _weight(weight_ptr, channel, is_channel, 2, WIDTH)
    weight3 = _weight(weight_ptr, channel, is_channel, 3, WIDTH)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    x1 = _row(x_ptr, x_stride, first - 1, tokens, channel, is_channel).to(tl.float32)
    x2 = _row(x_ptr, x_stride, first - 2, tokens, channel, is_channel).to(tl.float32)
    x3 = _row(x_ptr, x_stride, first - 3, tokens, channel, is_channel).to(tl.float32)
    next_x = _row(x_ptr, x_stride, first, tokens, channel, is_channel)
    later_x = _row(x_ptr, x_stride, first + 1, tokens, channel, is_channel)
    if ids_ptr is not None:
        ids_ptr += batch * tokens
    zeros = tl.zeros((BLOCK_C,), tl.float32)
    dp1 = tl.zeros((BLOCK_C,), tl.float32)
    # distinct expressions: Triton 3.6 merged variables of the loop that began with one value
    dp2, dp3 = dp1 + 0.0, dp1 * 1.0
    sum0, sum1, sum2, sum3, sum_dp = zeros, zeros, zeros, zeros, zeros
    is_float32: tl.constexpr = dx_ptr.dtype.element_ty == tl.float32
    next_dy = _row(dy_ptr, dy_stride, first, tokens, channel, is_channel)
    later_dy = _row(dy_ptr, dy_stride, first + 1, tokens, channel, is_channel)
    for step in range(ROWS + 3):
        t = first + step
        x0, next_x = next_x.to(tl.float32), later_x
        later_x = _row(x_ptr, x_stride, t + 2, tokens, channel, is_channel)
        dp, next_dy = next_dy.to(tl.float32), later_dy
        later_dy = _row(dy_ptr, dy_stride, t + 2, tokens, channel, is_channel)
        if ids_ptr is not None:
            own = _id(ids_ptr, t, tokens)
            x1 = tl.where(_id(ids_ptr, t - 1, tokens) == own, x1, 0.0)
            x2 = tl.where(_id(ids_ptr, t - 2, tokens) == own, x2, 0.0)
            x3 = tl.where(_id(ids_ptr, t - 3, tokens) == own, x3, 0.0)
        p = bias + x0 * weight0 + x1 * weight1 + x2 * weight2 + x3 * weight3
        if IS_SILU:
            share = sigmoid(p, is_float32)
            dp *= share * (1.0 + p * (1.0 - share))
        own_dp = tl.where(t < first + ROWS, dp, 0.0)
        sum0 += own_dp * x0
        sum1 += own_dp * x1
        sum2 += own_dp * x2
        sum3 += own_dp * x3
        sum_dp += own_dp
        ahead1, ahead2, ahead3 = dp2, dp1, dp  # of the token three rows behind
        if ids_ptr is not None:
            other = _id(ids_ptr, t - 3, tokens)
            ahead1 = tl.where(_id(ids_ptr, t - 2, tokens) == other, ahead1, 0.0)
            ahead2 = tl.where(_id(ids_ptr, t - 1, tokens) == other, ahead2, 0.0)
            ahead3 = tl.where(_id(ids_ptr, t, tokens) == other, ahead3, 0.0)
        dx = dp3 * weight0 + ahead1 * weight1 + ahead2 * weight2 + ahead3 * weight3
        mask = is_channel & (t - 3 >= first) & (t - 3 < tokens)
        tl.store(dx_ptr + (t - 3) * channels + channel, dx, mask=mask)
        x1, x2, x3 = x0, x1, x2
        dp1, dp2, dp3 = dp, dp1, dp2
    sums_ptr += (batch * tl.num_programs(0) + tl.program_id(0)) * 5 * channels
    tl.store(sums_ptr + channel, sum0, mask=is_channel)
    tl.store(sums_ptr + channels + channel, sum1, mask=is_channel)
    tl.store(sums_ptr + 2 * channels + channel, sum2, mask=is_channel)
    tl.store(sums_ptr + 3 * channels + channel, sum3, mask=is_channel)
    tl.store(sums_ptr + 4 * channels + channel, sum_dp, mask=is_channel)


def causal_conv(
    x: Tensor,  # (B, T, C) of contiguous channels
    weight: Tensor,  # (C, W)
    bias: Tensor | None,  # (C,)
    ids: Tensor | None,  # (B, T) int32
    activation: str | None,
    y: Tensor,  # (B, T, C)
) -> None:
    """Write y."""
    batch, tokens, channels = x.shape
    if not x.numel():
        return
    launch(
        _causal_conv_kernel,
        (-(-tokens // ROWS), -(-channels // BLOCK_C), batch),
        x,
        x.stride(0),
        x.stride(1),
        weight,
        bias,
        ids,
        y,
        tokens,
        channels,
        IS_SILU=activation == "silu",
        WIDTH=weight.shape[1],
        ROWS=ROWS,
        BLOCK_C=BLOCK_C,
        num_warps=WARPS,
    )


def causal_conv_backward(
    dy: Tensor,  # (B, T, C) of contiguous channels
    x: Tensor,  # (B, T, C) of contiguous channels
    weight: Tensor,  # (C, W)
    bias: Tensor | None,  # (C,)
    ids: Tensor | None,  # (B, T) int32
    activation: str | None,
    dx: Tensor,  # (B, T, C)
    dweight: Tensor,  # (C, W)
    dbias: Tensor,  # (C,), empty where there is no bias
) -> None:
    """Write dx, dweight and dbias."""
    batch, tokens, channels = x.shape
    tiles = -(-tokens // BACKWARD_ROWS)
    sums = torch.empty(batch * tiles, 5, channels, dtype=torch.float32, device=x.device)
    if x.numel():
        launch(
            _causal_conv_backward_kernel,
            (tiles, -(-channels // BLOCK_C), batch),
            dy,
            dy.stride(0),
            dy.stride(1),
            x,
            x.stride(0),
            x.stride(1),
            weight,
            bias,
            ids,
            dx,
            sums,
            tokens,
            channels,
            IS_SILU=activation == "silu",
            WIDTH=weight.shape[1],
            ROWS=BACKWARD_ROWS,
            BLOCK_C=BLOCK_C,
            num_warps=WARPS,
        )
    total = sums.sum(0)
    dweight.copy_(total[: weight.shape[1]].flip(0).t())
    if bias is not None:
        dbias.copy_(total[4])
