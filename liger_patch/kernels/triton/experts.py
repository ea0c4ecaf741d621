"""Triton form of what happens between the grouped products of experts. See ``experts``.

S: slots (a token and one of its experts), sorted by expert, I: intermediate size, H: hidden size,
R: rank, a power of two of at least 16, what the tensor cores multiply. No program adds to
what another one writes, so results repeat bit by bit. Extra memory: none.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.triton.gated import KINDS as GATED_KINDS
from liger_patch.kernels.triton.gated import activation_slope, apply_activation, sigmoid
from liger_patch.kernels.triton.launch import launch

KINDS = (*GATED_KINDS, "clamped")  # a kernel's ACTIVATION is a place in this tuple
CLAMPED = tl.constexpr(KINDS.index("clamped"))
BLOCK_S, BLOCK_I = 64, 64
BACKWARD_BLOCK_I = 32  # with 64, registers spill up to 1.4 kB a thread on sm_90, with 32 0.25
BLOCK_H = 128  # of the thin product; with 64 rows, 64 float32 a thread
SUM_BLOCK = 1024  # features of a program that sums slots
WARPS = 4


@triton.jit
def _rows_of_tile(offsets_ptr, experts, BLOCK_S: tl.constexpr, EXPERTS: tl.constexpr):
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
def _thin(ptr, row, mask, RANK: tl.constexpr):
    """Return rows of a thin matrix."""
    return tl.load(ptr + row[:, None] * RANK + tl.arange(0, RANK)[None, :], mask=mask, other=0.0)


@triton.jit
def _with_adapter(
    base_ptr, offsets, mask, bias_ptr, thin, b_ptr, feature, is_feature, RANK: tl.constexpr
):
    """Return the base's product, its bias and what the adapter adds, in float32."""
    tile = tl.load(base_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        tile += tl.load(bias_ptr + feature, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    if b_ptr is not None:
        place = feature[None, :] * RANK + tl.arange(0, RANK)[:, None]
        b = tl.load(b_ptr + place, mask=is_feature[None, :], other=0.0)
        tile += tl.dot(thin, b)
    return tile


@triton.jit
def _activated(gate, up, alpha, limit, shift, ACTIVATION: tl.constexpr):
    """Return act(gate), up as it multiplies, and the derivatives of both."""
    if ACTIVATION == CLAMPED:
        slope = tl.where(gate <= limit, 1.0, 0.0)
        up_slope = tl.where((up >= -limit) & (up <= limit), 1.0, 0.0)
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + shift
        share = sigmoid(gate * alpha, False)
        slope *= share * (1.0 + gate * alpha * (1.0 - share))
        activated = gate * share
    else:
        activated = apply_activation(gate, ACTIVATION)
        slope = activation_slope(gate, ACTIVATION)
        up_slope = tl.full(up.shape, 1.0, tl.float32)
    return activated, up, slope, up_slope


@triton.jit
def _experts_gated_kernel(
    gate_up_ptr,  # (S, 2 I)
    bias_ptr,  # (experts, 2 I), or None
    thin_ptr,  # (S, R), or None
    b_ptr,  # (experts, 2 I, R), None where thin is
    h_ptr,  # (S, I)
    offsets_ptr,  # (experts,)
    experts,
    columns,  # I
    up_column,  # of the first feature of up: I or 1
    alpha,
    limit,
    shift,
    STEP: tl.constexpr,  # between features of gate: 1 or 2
    ACTIVATION: tl.constexpr,
    RANK: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """One program per block of an expert's rows and block of columns."""
    expert, first, end = _rows_of_tile(offsets_ptr, experts, BLOCK_S, EXPERTS)  # pyright: ignore
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_S)
    column = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    is_row, is_column = row < end, column < columns
    mask = is_row[:, None] & is_column[None, :]
    gate_feature, up_feature = column * STEP, column * STEP + up_column
    if bias_ptr is not None:
        bias_ptr += expert * 2 * columns
    thin = 0.0
    if b_ptr is not None:
        b_ptr += expert * 2 * columns * RANK
        thin = _thin(thin_ptr, row, is_row[:, None], RANK)
    rows = row[:, None] * (2 * columns)
    gate = _with_adapter(
        gate_up_ptr, rows + gate_feature[None, :], mask, bias_ptr, thin, b_ptr, gate_feature,
        is_column, RANK,
    )  # fmt: skip
    up = _with_adapter(
        gate_up_ptr, rows + up_feature[None, :], mask, bias_ptr, thin, b_ptr, up_feature,
        is_column, RANK,
    )  # fmt: skip
    activated, up, _, _ = _activated(gate, up, alpha, limit, shift, ACTIVATION)
    tl.store(h_ptr + row[:, None] * columns + column[None, :], activated * up, mask=mask)


@triton.jit
def _experts_gated_backward_kernel(
    dh_ptr,  # (S, I), of a slot's result; becomes the slot's weight times h
    gate_up_ptr,  # (S, 2 I)
    dgate_up_ptr,  # (S, 2 I)
    bias_ptr,  # (experts, 2 I), or None
    thin_ptr,  # (S, R), or None
    b_ptr,  # (experts, 2 I, R), None where thin is
    dthin_ptr,  # (S, DOWN_RANK), or None
    a_ptr,  # (experts, DOWN_RANK, I), None where dthin is
    weights_ptr,  # (S,)
    dweights_ptr,  # (S,)
    offsets_ptr,  # (experts,)
    experts,
    columns,  # I
    up_column,  # of the first feature of up: I or 1
    alpha,
    limit,
    shift,
    STEP: tl.constexpr,  # between features of gate: 1 or 2
    ACTIVATION: tl.constexpr,
    RANK: tl.constexpr,
    DOWN_RANK: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """One program per block of an expert's rows."""
    expert, first, end = _rows_of_tile(offsets_ptr, experts, BLOCK_S, EXPERTS)  # pyright: ignore
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_S)
    is_row = row < end
    weights = tl.load(weights_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    dweights = tl.zeros((BLOCK_S,), dtype=tl.float32)
    if bias_ptr is not None:
        bias_ptr += expert * 2 * columns
    thin = 0.0
    if b_ptr is not None:
        b_ptr += expert * 2 * columns * RANK
        thin = _thin(thin_ptr, row, is_row[:, None], RANK)
    dthin = 0.0
    if a_ptr is not None:
        a_ptr += expert * columns * DOWN_RANK
        dthin = _thin(dthin_ptr, row, is_row[:, None], DOWN_RANK)
    rows = row[:, None] * (2 * columns)
    for start in range(0, columns, BLOCK_I):
        column = start + tl.arange(0, BLOCK_I)
        is_column = column < columns
        mask = is_row[:, None] & is_column[None, :]
        gate_feature, up_feature = column * STEP, column * STEP + up_column
        gate_place, up_place = rows + gate_feature[None, :], rows + up_feature[None, :]
        place = row[:, None] * columns + column[None, :]
        dh = tl.load(dh_ptr + place, mask=mask, other=0.0).to(tl.float32)
        gate = _with_adapter(
            gate_up_ptr, gate_place, mask, bias_ptr, thin, b_ptr, gate_feature, is_column,
            RANK,
        )  # fmt: skip
        up = _with_adapter(
            gate_up_ptr, up_place, mask, bias_ptr, thin, b_ptr, up_feature, is_column,
            RANK,
        )  # fmt: skip
        if a_ptr is not None:
            r = tl.arange(0, DOWN_RANK)
            of_a = r[:, None] * columns + column[None, :]
            a = tl.load(a_ptr + of_a, mask=is_column[None, :], other=0.0)
            dh += tl.dot(dthin, a)
        activated, up, slope, up_slope = _activated(gate, up, alpha, limit, shift, ACTIVATION)
        h = activated * up
        dweights += tl.sum(dh * h, 1)
        dh *= weights[:, None]
        tl.store(dgate_up_ptr + gate_place, dh * up * slope, mask=mask)
        tl.store(dgate_up_ptr + up_place, dh * activated * up_slope, mask=mask)
        tl.debug_barrier()  # every thread has read its dh before any thread overwrites it
        tl.store(dh_ptr + place, h * weights[:, None], mask=mask)
    tl.store(dweights_ptr + row, dweights, mask=is_row)


@triton.jit
def _add_thin_kernel(
    y_ptr,  # (S, features)
    thin_ptr,  # (S, R)
    b_ptr,  # (experts, features, R), of any strides
    offsets_ptr,  # (experts,)
    experts,
    features,
    b_expert_stride,
    b_stride,
    b_rank_stride,
    RANK: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per block of an expert's rows and block of features."""
    expert, first, end = _rows_of_tile(offsets_ptr, experts, BLOCK_S, EXPERTS)  # pyright: ignore
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_S)
    feature = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_row, is_feature = row < end, feature < features
    mask = is_row[:, None] & is_feature[None, :]
    thin = _thin(thin_ptr, row, is_row[:, None], RANK)
    r = tl.arange(0, RANK)
    of_b = feature[None, :] * b_stride + r[:, None] * b_rank_stride
    b = tl.load(b_ptr + expert * b_expert_stride + of_b, mask=is_feature[None, :], other=0.0)
    place = row[:, None] * features + feature[None, :]
    y = tl.load(y_ptr + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, y + tl.dot(thin, b), mask=mask)


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


def _tiles(rows: int, experts: int) -> int:
    """Return how many blocks of rows there may be at most: the host does not read the counts."""
    return -(-rows // BLOCK_S) + min(experts, rows)


def gated(
    gate_up: Tensor,  # (S, 2 I)
    bias: Tensor | None,  # (E, 2 I)
    thin: Tensor | None,  # (S, R)
    b: Tensor | None,  # (E, 2 I, R)
    h: Tensor,  # (S, I)
    offsets: Tensor,  # (E,) int32
    activation: str,
    alpha: float,
    limit: float,
    shift: float,
    is_interleaved: bool,
) -> None:
    """Write h; all contiguous, S > 0."""
    rows, columns = h.shape
    experts = len(offsets)
    grid = _tiles(rows, experts), triton.cdiv(columns, BLOCK_I)
    launch(
        _experts_gated_kernel,
        grid,
        gate_up,
        bias,
        thin,
        b,
        h,
        offsets,
        experts,
        columns,
        1 if is_interleaved else columns,
        alpha,
        limit,
        shift,
        STEP=2 if is_interleaved else 1,
        ACTIVATION=KINDS.index(activation),
        RANK=16 if b is None else b.shape[2],
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK_S=BLOCK_S,
        BLOCK_I=BLOCK_I,
        num_warps=WARPS,
    )


def gated_backward_(
    dh: Tensor,  # (S, I), becomes the slot's weight times h
    gate_up: Tensor,  # (S, 2 I)
    dgate_up: Tensor,  # (S, 2 I)
    bias: Tensor | None,  # (E, 2 I)
    thin: Tensor | None,  # (S, R)
    b: Tensor | None,  # (E, 2 I, R)
    dthin: Tensor | None,  # (S, R of down)
    a: Tensor | None,  # (E, R of down, I)
    weights: Tensor,  # (S,)
    dweights: Tensor,  # (S,)
    offsets: Tensor,  # (E,) int32
    activation: str,
    alpha: float,
    limit: float,
    shift: float,
    is_interleaved: bool,
) -> None:
    """Write dgate_up and dweights; all contiguous, S > 0."""
    rows, columns = dh.shape
    experts = len(offsets)
    launch(
        _experts_gated_backward_kernel,
        (_tiles(rows, experts),),
        dh,
        gate_up,
        dgate_up,
        bias,
        thin,
        b,
        dthin,
        a,
        weights,
        dweights,
        offsets,
        experts,
        columns,
        1 if is_interleaved else columns,
        alpha,
        limit,
        shift,
        STEP=2 if is_interleaved else 1,
        ACTIVATION=KINDS.index(activation),
        RANK=16 if b is None else b.shape[2],
        DOWN_RANK=16 if a is None else a.shape[1],
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK_S=BLOCK_S,
        BLOCK_I=BACKWARD_BLOCK_I,
        num_warps=WARPS,
    )


def add_thin_(
    y: Tensor,  # (S, H)
    thin: Tensor,  # (S, R)
    b: Tensor,  # (E, H, R), of any strides
    offsets: Tensor,  # (E,) int32
) -> None:
    """Add ``thin b'`` to y, each row with its expert's matrix; y and thin contiguous."""
    experts = len(offsets)
    grid = _tiles(len(y), experts), triton.cdiv(y.shape[1], BLOCK_H)
    launch(
        _add_thin_kernel,
        grid,
        y,
        thin,
        b,
        offsets,
        experts,
        y.shape[1],
        *b.stride(),
        RANK=b.shape[2],
        EXPERTS=triton.next_power_of_2(experts),
        BLOCK_S=BLOCK_S,
        BLOCK_H=BLOCK_H,
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
