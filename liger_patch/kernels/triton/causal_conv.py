"""Triton form of the causal convolution. The formulas and letters are in ``causal_conv``.

A program walks over rows of some channels, four at a time. It holds the last three in registers,
which the next four need too, and the next four are on their way while it computes: each row is read
once, but for three at each program's boundary.

Extra memory of the backward pass: the sums of each of P blocks of rows, (P, 5, C) floats, summed in
a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.triton.gated import sigmoid
from liger_patch.kernels.triton.launch import launch

# On an H200, (4, 2048, 8192) in bf16: the forward pass takes 1.22 of a copy's time, the backward
# pass, which reads two tensors and computes 3 % more sigmoids, 2.2 (its bytes alone 1.5).
BLOCK_C, WARPS = 256, 2  # channels of a program
ROWS, BACKWARD_ROWS = 32, 128  # of a program: multiples of 4; the second has sums to write


@triton.jit
def _weight(weight_ptr, channel, is_channel, behind, WIDTH: tl.constexpr):
    """Return the weights of the token so far behind, 0 where there are none."""
    place = channel * WIDTH + WIDTH - 1 - behind
    mask = is_channel & (place >= channel * WIDTH)
    return tl.load(weight_ptr + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _weights(weight_ptr, channel, is_channel, WIDTH: tl.constexpr):
    return (
        _weight(weight_ptr, channel, is_channel, 0, WIDTH),
        _weight(weight_ptr, channel, is_channel, 1, WIDTH),
        _weight(weight_ptr, channel, is_channel, 2, WIDTH),
        _weight(weight_ptr, channel, is_channel, 3, WIDTH),
    )


@triton.jit
def _row(ptr, stride, t, tokens, channel, is_channel):
    """Return one token's row, zeros where there is no such token."""
    mask = is_channel & (t >= 0) & (t < tokens)
    return tl.load(ptr + t * stride + channel, mask=mask, other=0.0)


@triton.jit
def _four_rows(ptr, stride, t, tokens, channel, is_channel):
    return (
        _row(ptr, stride, t, tokens, channel, is_channel),
        _row(ptr, stride, t + 1, tokens, channel, is_channel),
        _row(ptr, stride, t + 2, tokens, channel, is_channel),
        _row(ptr, stride, t + 3, tokens, channel, is_channel),
    )


@triton.jit
def _three_rows_before(ptr, stride, t, tokens, channel, is_channel):
    return (
        _row(ptr, stride, t - 1, tokens, channel, is_channel).to(tl.float32),
        _row(ptr, stride, t - 2, tokens, channel, is_channel).to(tl.float32),
        _row(ptr, stride, t - 3, tokens, channel, is_channel).to(tl.float32),
    )


@triton.jit
def _id(ids_ptr, t, tokens):
    """Return the id of a token's sequence; 0 without ids."""
    if ids_ptr is None:
        return 0
    else:
        return tl.load(ids_ptr + t, mask=(t >= 0) & (t < tokens), other=-1)


@triton.jit
def _of_sequence(row, id, own, ids_ptr):
    """Return a row, zeros where it is another sequence's."""
    if ids_ptr is not None:
        row = tl.where(id == own, row, 0.0)
    return row


@triton.jit
def _taps(row0, row1, row2, row3, id0, id1, id2, id3, w0, w1, w2, w3, ids_ptr):
    """Return the weighted sum of a row and its three neighbours on one side, of one sequence."""
    row1 = _of_sequence(row1, id1, id0, ids_ptr)
    row2 = _of_sequence(row2, id2, id0, ids_ptr)
    row3 = _of_sequence(row3, id3, id0, ids_ptr)
    return row0 * w0 + row1 * w1 + row2 * w2 + row3 * w3


@triton.jit
def _activate(p, IS_SILU: tl.constexpr, IS_FLOAT32: tl.constexpr):
    if IS_SILU:
        p *= sigmoid(p, IS_FLOAT32)
    return p


@triton.jit
def _dp(dy, p, IS_SILU: tl.constexpr, IS_FLOAT32: tl.constexpr):
    dp = dy.to(tl.float32)
    if IS_SILU:
        share = sigmoid(p, IS_FLOAT32)
        dp *= share * (1.0 + p * (1.0 - share))
    return dp


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
    """One program per block of channels and block of a sequence's tokens."""
    first, batch = tl.program_id(1).to(tl.int64) * ROWS, tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    x_ptr += batch * x_batch_stride
    y_ptr += batch * tokens * channels + channel
    w0, w1, w2, w3 = _weights(weight_ptr, channel, is_channel, WIDTH)  # pyright: ignore
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    if ids_ptr is not None:
        ids_ptr += batch * tokens
    b1, b2, b3 = _three_rows_before(x_ptr, x_stride, first, tokens, channel, is_channel)
    n0, n1, n2, n3 = _four_rows(x_ptr, x_stride, first, tokens, channel, is_channel)
    f32: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    for step in range(ROWS // 4):
        t = first + 4 * step
        x0, x1, x2, x3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        n0, n1, n2, n3 = _four_rows(x_ptr, x_stride, t + 4, tokens, channel, is_channel)
        c1, c2, c3 = (
            _id(ids_ptr, t - 1, tokens),
            _id(ids_ptr, t - 2, tokens),
            _id(ids_ptr, t - 3, tokens),
        )
        i0, i1 = _id(ids_ptr, t, tokens), _id(ids_ptr, t + 1, tokens)
        i2, i3 = _id(ids_ptr, t + 2, tokens), _id(ids_ptr, t + 3, tokens)
        p0 = bias + _taps(x0, b1, b2, b3, i0, c1, c2, c3, w0, w1, w2, w3, ids_ptr)
        p1 = bias + _taps(x1, x0, b1, b2, i1, i0, c1, c2, w0, w1, w2, w3, ids_ptr)
        p2 = bias + _taps(x2, x1, x0, b1, i2, i1, i0, c1, w0, w1, w2, w3, ids_ptr)
        p3 = bias + _taps(x3, x2, x1, x0, i3, i2, i1, i0, w0, w1, w2, w3, ids_ptr)
        y = y_ptr + t * channels
        tl.store(y, _activate(p0, IS_SILU, f32), mask=is_channel & (t < tokens))
        y += channels
        tl.store(y, _activate(p1, IS_SILU, f32), mask=is_channel & (t + 1 < tokens))
        y += channels
        tl.store(y, _activate(p2, IS_SILU, f32), mask=is_channel & (t + 2 < tokens))
        y += channels
        tl.store(y, _activate(p3, IS_SILU, f32), mask=is_channel & (t + 3 < tokens))
        b1, b2, b3 = x3, x2, x1


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
    """One program per block of channels and block of a sequence's tokens. It goes four rows on, for
    dp: dx of a row is stored once dp of the three after it is known.
    """
    first, batch = tl.program_id(1).to(tl.int64) * ROWS, tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = channel < channels
    dy_ptr += batch * dy_batch_stride
    x_ptr += batch * x_batch_stride
    dx_ptr += batch * tokens * channels + channel
    w0, w1, w2, w3 = _weights(weight_ptr, channel, is_channel, WIDTH)  # pyright: ignore
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)
    if ids_ptr is not None:
        ids_ptr += batch * tokens
    b1, b2, b3 = _three_rows_before(x_ptr, x_stride, first, tokens, channel, is_channel)
    n0, n1, n2, n3 = _four_rows(x_ptr, x_stride, first, tokens, channel, is_channel)
    m0, m1, m2, m3 = _four_rows(dy_ptr, dy_stride, first, tokens, channel, is_channel)
    # Of rows before the first, whose dx is another program's: any numbers do, if they differ. With
    # zeros for all three, whose values move on from one to the next, Triton 3.6 gave a wrong dx.
    e1, e2, e3 = b1 * w0, b2 * w0, b3 * w0
    sum0 = tl.zeros((BLOCK_C,), tl.float32)
    sum1, sum2, sum3, sum_dp = sum0, sum0, sum0, sum0
    f32: tl.constexpr = dx_ptr.dtype.element_ty == tl.float32
    for step in range(ROWS // 4 + 1):
        t = first + 4 * step
        is_own = t < first + ROWS
        x0, x1, x2, x3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        dy0, dy1, dy2, dy3 = m0, m1, m2, m3
        is_next = is_channel & is_own
        n0, n1, n2, n3 = _four_rows(x_ptr, x_stride, t + 4, tokens, channel, is_next)
        m0, m1, m2, m3 = _four_rows(dy_ptr, dy_stride, t + 4, tokens, channel, is_next)
        c1, c2, c3 = (
            _id(ids_ptr, t - 1, tokens),
            _id(ids_ptr, t - 2, tokens),
            _id(ids_ptr, t - 3, tokens),
        )
        i0, i1 = _id(ids_ptr, t, tokens), _id(ids_ptr, t + 1, tokens)
        i2, i3 = _id(ids_ptr, t + 2, tokens), _id(ids_ptr, t + 3, tokens)
        p0 = bias + _taps(x0, b1, b2, b3, i0, c1, c2, c3, w0, w1, w2, w3, ids_ptr)
        p1 = bias + _taps(x1, x0, b1, b2, i1, i0, c1, c2, w0, w1, w2, w3, ids_ptr)
        p2 = bias + _taps(x2, x1, x0, b1, i2, i1, i0, c1, w0, w1, w2, w3, ids_ptr)
        p3 = bias + _taps(x3, x2, x1, x0, i3, i2, i1, i0, w0, w1, w2, w3, ids_ptr)
        d0, d1 = _dp(dy0, p0, IS_SILU, f32), _dp(dy1, p1, IS_SILU, f32)
        d2, d3 = _dp(dy2, p2, IS_SILU, f32), _dp(dy3, p3, IS_SILU, f32)
        if is_own:
            sum0 += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3
            sum1 += (
                d0 * _of_sequence(b1, c1, i0, ids_ptr)
                + d1 * _of_sequence(x0, i0, i1, ids_ptr)
                + d2 * _of_sequence(x1, i1, i2, ids_ptr)
                + d3 * _of_sequence(x2, i2, i3, ids_ptr)
            )
            sum2 += (
                d0 * _of_sequence(b2, c2, i0, ids_ptr)
                + d1 * _of_sequence(b1, c1, i1, ids_ptr)
                + d2 * _of_sequence(x0, i0, i2, ids_ptr)
                + d3 * _of_sequence(x1, i1, i3, ids_ptr)
            )
            sum3 += (
                d0 * _of_sequence(b3, c3, i0, ids_ptr)
                + d1 * _of_sequence(b2, c2, i1, ids_ptr)
                + d2 * _of_sequence(b1, c1, i2, ids_ptr)
                + d3 * _of_sequence(x0, i0, i3, ids_ptr)
            )
            sum_dp += d0 + d1 + d2 + d3
        dx = dx_ptr + (t - 3) * channels
        is_before = is_channel & (t > first)
        dx3 = _taps(e3, e2, e1, d0, c3, c2, c1, i0, w0, w1, w2, w3, ids_ptr)
        tl.store(dx, dx3, mask=is_before & (t - 3 < tokens))
        dx += channels
        dx2 = _taps(e2, e1, d0, d1, c2, c1, i0, i1, w0, w1, w2, w3, ids_ptr)
        tl.store(dx, dx2, mask=is_before & (t - 2 < tokens))
        dx += channels
        dx1 = _taps(e1, d0, d1, d2, c1, i0, i1, i2, w0, w1, w2, w3, ids_ptr)
        tl.store(dx, dx1, mask=is_before & (t - 1 < tokens))
        dx += channels
        dx0 = _taps(d0, d1, d2, d3, i0, i1, i2, i3, w0, w1, w2, w3, ids_ptr)
        tl.store(dx, dx0, mask=is_next & (t < tokens))
        b1, b2, b3 = x3, x2, x1
        e1, e2, e3 = d3, d2, d1
    sums_ptr += (batch * tl.num_programs(1) + tl.program_id(1)) * 5 * channels + channel
    tl.store(sums_ptr, sum0, mask=is_channel)
    tl.store(sums_ptr + channels, sum1, mask=is_channel)
    tl.store(sums_ptr + 2 * channels, sum2, mask=is_channel)
    tl.store(sums_ptr + 3 * channels, sum3, mask=is_channel)
    tl.store(sums_ptr + 4 * channels, sum_dp, mask=is_channel)


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
        (-(-channels // BLOCK_C), -(-tokens // ROWS), batch),
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
            (-(-channels // BLOCK_C), tiles, batch),
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
