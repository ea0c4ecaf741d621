"""Triton form of what happens between the grouped products of experts. See ``experts``.

S: slots (a token and one of its experts), sorted by expert, I: intermediate size, H: hidden size,
R: rank, a power of two of at least 16, what the tensor cores multiply. No program adds to
what another one writes, so results repeat bit by bit. Extra memory: none.
"""

import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.triton.expert_rows import BLOCK_H, BLOCK_S, WARPS, rows_of_tile, tiles_of
from liger_patch.kernels.triton.gated import KINDS as GATED_KINDS
from liger_patch.kernels.triton.gated import activation_slope, apply_activation, sigmoid
from liger_patch.kernels.triton.launch import launch

KINDS = (*GATED_KINDS, "clamped")  # a kernel's ACTIVATION is a place in this tuple
CLAMPED = tl.constexpr(KINDS.index("clamped"))
BLOCK_I = 32  # with 64, registers of the backward pass spill up to 1.4 kB a thread on sm_90


@triton.jit
def _thin(ptr, row, mask, RANK: tl.constexpr):
    """Return rows of a thin matrix."""
    return tl.load(ptr + row[:, None] * RANK + tl.arange(0, RANK)[None, :], mask=mask, other=0.0)


@triton.jit
def _store_thin(ptr, row, mask, values, RANK: tl.constexpr):
    """Write rows of a thin matrix."""
    tl.store(ptr + row[:, None] * RANK + tl.arange(0, RANK)[None, :], values, mask=mask)


@triton.jit
def _with_adapter(
    base_ptr, offsets, mask, bias_ptr, thin, b_ptr, feature, is_feature, RANK: tl.constexpr
):
    """Return the sum of the base's product, bias and adapter, in float32; and B (R, n)."""
    tile = tl.load(base_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        tile += tl.load(bias_ptr + feature, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    b = 0.0
    if b_ptr is not None:
        place = feature[None, :] * RANK + tl.arange(0, RANK)[:, None]
        b = tl.load(b_ptr + place, mask=is_feature[None, :], other=0.0)
        tile += tl.dot(thin, b)
    return tile, b


@triton.jit
def _of_down(a_ptr, column, is_column, columns, RANK: tl.constexpr):
    """Return columns of the second product's A (R, n)."""
    place = tl.arange(0, RANK)[:, None] * columns + column[None, :]
    return tl.load(a_ptr + place, mask=is_column[None, :], other=0.0)


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
    a_ptr,  # (experts, DOWN_RANK, I), or None
    down_thin_ptr,  # (S, DOWN_RANK): h times a', None where a is
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
    DOWN_RANK: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """One program per block of an expert's rows."""
    expert, first, end = rows_of_tile(offsets_ptr, experts, BLOCK_S, EXPERTS)  # pyright: ignore
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_S)
    is_row = row < end
    if bias_ptr is not None:
        bias_ptr += expert * 2 * columns
    thin = 0.0
    if b_ptr is not None:
        b_ptr += expert * 2 * columns * RANK
        thin = _thin(thin_ptr, row, is_row[:, None], RANK)
    if a_ptr is not None:
        a_ptr += expert * columns * DOWN_RANK
    down_thin = tl.zeros((BLOCK_S, DOWN_RANK), dtype=tl.float32)
    rows = row[:, None] * (2 * columns)
    for start in range(0, columns, BLOCK_I):
        column = start + tl.arange(0, BLOCK_I)
        is_column = column < columns
        mask = is_row[:, None] & is_column[None, :]
        gate_feature, up_feature = column * STEP, column * STEP + up_column
        gate, _ = _with_adapter(
            gate_up_ptr, rows + gate_feature[None, :], mask, bias_ptr, thin, b_ptr,
            gate_feature, is_column, RANK,
        )  # fmt: skip
        up, _ = _with_adapter(
            gate_up_ptr, rows + up_feature[None, :], mask, bias_ptr, thin, b_ptr, up_feature,
            is_column, RANK,
        )  # fmt: skip
        activated, up, _, _ = _activated(gate, up, alpha, limit, shift, ACTIVATION)
        h = (activated * up).to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row[:, None] * columns + column[None, :], h, mask=mask)
        if a_ptr is not None:
            a = _of_down(a_ptr, column, is_column, columns, DOWN_RANK)
            down_thin += tl.dot(h, tl.trans(a))
    if a_ptr is not None:
        _store_thin(down_thin_ptr, row, is_row[:, None], down_thin, DOWN_RANK)


@triton.jit
def _experts_gated_backward_kernel(
    dh_ptr,  # (S, I), of a slot's result; becomes the slot's weight times h
    gate_up_ptr,  # (S, 2 I)
    dgate_up_ptr,  # (S, 2 I)
    bias_ptr,  # (experts, 2 I), or None
    thin_ptr,  # (S, R), or None
    b_ptr,  # (experts, 2 I, R), None where thin is
    dthin_ptr,  # (S, R), None where thin is
    ddown_thin_ptr,  # (S, DOWN_RANK), or None
    a_ptr,  # (experts, DOWN_RANK, I), None where ddown_thin is
    down_thin_ptr,  # (S, DOWN_RANK), None where ddown_thin is
    weighted_ptr,  # (S, DOWN_RANK): the slot's weight times down_thin
    weights_ptr,  # (S,), not sorted
    dweights_ptr,  # (S,), not sorted
    slots_ptr,  # (S,): the place of each row among those that are not sorted
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
    expert, first, end = rows_of_tile(offsets_ptr, experts, BLOCK_S, EXPERTS)  # pyright: ignore
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_S)
    is_row = row < end
    slot = tl.load(slots_ptr + row, mask=is_row, other=0)
    weights = tl.load(weights_ptr + slot, mask=is_row, other=0.0).to(tl.float32)
    dweights = tl.zeros((BLOCK_S,), dtype=tl.float32)
    if bias_ptr is not None:
        bias_ptr += expert * 2 * columns
    thin = 0.0
    if b_ptr is not None:
        b_ptr += expert * 2 * columns * RANK
        thin = _thin(thin_ptr, row, is_row[:, None], RANK)
    dthin = tl.zeros((BLOCK_S, RANK), dtype=tl.float32)
    ddown_thin = 0.0
    if a_ptr is not None:
        a_ptr += expert * columns * DOWN_RANK
        ddown_thin = _thin(ddown_thin_ptr, row, is_row[:, None], DOWN_RANK)
        weighted = _thin(down_thin_ptr, row, is_row[:, None], DOWN_RANK) * weights[:, None]
        _store_thin(weighted_ptr, row, is_row[:, None], weighted, DOWN_RANK)
    rows = row[:, None] * (2 * columns)
    for start in range(0, columns, BLOCK_I):
        column = start + tl.arange(0, BLOCK_I)
        is_column = column < columns
        mask = is_row[:, None] & is_column[None, :]
        gate_feature, up_feature = column * STEP, column * STEP + up_column
        gate_place, up_place = rows + gate_feature[None, :], rows + up_feature[None, :]
        place = row[:, None] * columns + column[None, :]
        dh = tl.load(dh_ptr + place, mask=mask, other=0.0).to(tl.float32)
        gate, gate_b = _with_adapter(
            gate_up_ptr, gate_place, mask, bias_ptr, thin, b_ptr, gate_feature, is_column,
            RANK,
        )  # fmt: skip
        up, up_b = _with_adapter(
            gate_up_ptr, up_place, mask, bias_ptr, thin, b_ptr, up_feature, is_column,
            RANK,
        )  # fmt: skip
        if a_ptr is not None:
            dh += tl.dot(ddown_thin, _of_down(a_ptr, column, is_column, columns, DOWN_RANK))
        activated, up, slope, up_slope = _activated(gate, up, alpha, limit, shift, ACTIVATION)
        h = activated * up
        dweights += tl.sum(dh * h, 1)
        dh *= weights[:, None]
        dgate = (dh * up * slope).to(dgate_up_ptr.dtype.element_ty)
        dup = (dh * activated * up_slope).to(dgate_up_ptr.dtype.element_ty)
        tl.store(dgate_up_ptr + gate_place, dgate, mask=mask)
        tl.store(dgate_up_ptr + up_place, dup, mask=mask)
        if b_ptr is not None:
            dthin += tl.dot(dgate, tl.trans(gate_b))
            dthin += tl.dot(dup, tl.trans(up_b))
        tl.debug_barrier()  # every thread has read its dh before any thread overwrites it
        tl.store(dh_ptr + place, h * weights[:, None], mask=mask)
    tl.store(dweights_ptr + slot, dweights, mask=is_row)
    if b_ptr is not None:
        _store_thin(dthin_ptr, row, is_row[:, None], dthin, RANK)


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
    expert, first, end = rows_of_tile(offsets_ptr, experts, BLOCK_S, EXPERTS)  # pyright: ignore
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


def gated(
    gate_up: Tensor,  # (S, 2 I)
    bias: Tensor | None,  # (E, 2 I)
    thin: Tensor | None,  # (S, R)
    b: Tensor | None,  # (E, 2 I, R)
    a: Tensor | None,  # (E, R of down, I)
    down_thin: Tensor | None,  # (S, R of down)
    h: Tensor,  # (S, I)
    offsets: Tensor,  # (E,) int32
    activation: str,
    alpha: float,
    limit: float,
    shift: float,
    is_interleaved: bool,
) -> None:
    """Write h and down_thin; all contiguous, S > 0."""
    rows, columns = h.shape
    experts = len(offsets)
    launch(
        _experts_gated_kernel,
        (tiles_of(rows, experts),),
        gate_up,
        bias,
        thin,
        b,
        a,
        down_thin,
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
        DOWN_RANK=16 if a is None else a.shape[1],
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
    dthin: Tensor | None,  # (S, R)
    ddown_thin: Tensor | None,  # (S, R of down)
    a: Tensor | None,  # (E, R of down, I)
    down_thin: Tensor | None,  # (S, R of down)
    weighted: Tensor | None,  # (S, R of down)
    weights: Tensor,  # (N, K)
    dweights: Tensor,  # (N, K)
    slots: Tensor,  # (S,) int32
    offsets: Tensor,  # (E,) int32
    activation: str,
    alpha: float,
    limit: float,
    shift: float,
    is_interleaved: bool,
) -> None:
    """Write dgate_up, dthin, dweights, and weighted, the slot's weight times down_thin; all
    contiguous, S > 0.
    """
    rows, columns = dh.shape
    experts = len(offsets)
    launch(
        _experts_gated_backward_kernel,
        (tiles_of(rows, experts),),
        dh,
        gate_up,
        dgate_up,
        bias,
        thin,
        b,
        dthin,
        ddown_thin,
        a,
        down_thin,
        weighted,
        weights,
        dweights,
        slots,
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
        BLOCK_I=BLOCK_I,
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
    grid = tiles_of(len(y), experts), triton.cdiv(y.shape[1], BLOCK_H)
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
