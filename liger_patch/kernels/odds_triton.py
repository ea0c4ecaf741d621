"""Triton form of a head's matrix product and softmax in one: hidden states to odds, on Hopper.

The odds of class v against the label y of its token, and what follows from them:

    odds_v = exp(z_v - z_y)        others = sum over v != y of odds_v
    loss   = log(1 + others)       dloss/dz_v = odds_v / (1 + others), v != y

with z the logits of ``loss_options``. Nothing of a row is needed before its odds can be written but
z_y, a dot product of its own. So the product's tiles leave the registers as odds, and no kernel
walks the logits: the gradient is ``factors[:, None] * odds``, and a product with a diagonal factor
needs no pass over the odds either. The logits are never rounded to 16 bits.

Where a token's loss exceeds 60 nats, its odds might overflow: then the device, unasked by the host,
computes the chunk again, against each row's largest logit.

C: rows, H: hidden size, V: vocabulary, T: tiles of TILE_V columns. Extra memory: C * T floats. The
idea that the exponential of a row needs no maximum if another reference is at hand: Milakov and
Gimelshein (arXiv:1805.02867) with the label in the maximum's place.
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.loss_options import LossOptions
from liger_patch.kernels.supervised import Tokens

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton < 3.4
    TensorDescriptor = None

TILE_ROWS, TILE_V, TILE_H = 128, 128, 64  # of a tile of odds, and of a step of its product
# tiles of rows that share a tile of the weight: as many as keep about 4 MiB of the hidden states in
# the L2 cache (measured: of 4096 columns, 4 are 7 % faster than 8)
GROUPED_COLUMNS, MAX_GROUPED_TILES = 16384, 16
TILES: dict[str, Any] = {
    "TILE_ROWS": TILE_ROWS,
    "TILE_V": TILE_V,
    "TILE_H": TILE_H,
    "num_warps": 4,
    "num_stages": 3,
}
PROGRAMS = 2  # on a processor: while one turns its tile into odds, the other multiplies
FINISHED: dict[str, Any] = {"BLOCK_ROWS": 8, "BLOCK_TILES": 256}
DOT: dict[str, Any] = {"BLOCK_H": 1024}
MAX_ODDS = tl.constexpr(2.0**86)  # of a row: e^60; factors and odds stay far within float32
MAX_GAP = 59.0  # nats between two logits that no row exceeds below MAX_ODDS, with a margin
LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
HOPPER = (9, 0)


@triton.jit
def _z_and_slope(x, logit_scale, softcap):
    """z times log2(e), and dz/dx over logit_scale, of raw logits x."""
    slope = 1.0
    if softcap is not None:
        # tanh(u) = 1 - 2 r with r = 1 / (1 + exp(2 u)): off by 2e-7 at most. A root and a square
        # are two instructions, a division is eight
        root = tl.rsqrt(1.0 + tl.exp2(x * (2.0 * LOG2_E * logit_scale / softcap)))
        r = root * root
        z = softcap * LOG2_E - (2.0 * softcap * LOG2_E) * r
        slope = 4.0 * (r - r * r)
    else:
        z = x * (logit_scale * LOG2_E)
    return z, slope


@triton.jit
def _label_logit_kernel(
    x_ptr,  # (N, H)
    x_stride,
    rows_ptr,  # (N,) of x for each token
    weight_ptr,  # (V, H)
    weight_stride,
    labels_ptr,  # (N,)
    counts_ptr,  # (1,) supervised tokens
    label_logit_ptr,  # (N,) raw
    label_z_ptr,  # (N,) times log2(e)
    reference_ptr,  # (N,) the same
    hidden_size,
    vocab_size,
    softcap,  # None for none
    logit_scale,
    BLOCK_H: tl.constexpr,
):
    """One program per token: its label's logit, where it has a label."""
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + token)
    if (token >= tl.load(counts_ptr)) | (label < 0) | (label >= vocab_size):
        return
    row = tl.load(rows_ptr + token)
    x_ptr += row * x_stride
    weight_ptr += label * weight_stride
    columns = tl.arange(0, BLOCK_H)
    dot = tl.zeros((BLOCK_H,), dtype=tl.float32)
    for start in range(0, hidden_size, BLOCK_H):
        mask = start + columns < hidden_size
        x = tl.load(x_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(weight_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        dot += x * w
    logit = tl.sum(dot, axis=0)
    z, _ = _z_and_slope(logit, logit_scale, softcap)
    tl.store(label_logit_ptr + token, logit)
    tl.store(label_z_ptr + token, z)
    tl.store(reference_ptr + token, z)


@triton.jit
def _write_odds(
    logits,  # (rows, columns)
    odds,  # descriptor
    reference,  # (rows,)
    label,  # (rows,)
    row_start,
    v_start,
    vocab_size,
    softcap,
    logit_scale,
):
    """Write the odds of raw logits; return their sum and the largest z in each row."""
    columns: tl.constexpr = logits.shape[1]
    column = v_start + tl.arange(0, columns)
    z, slope = _z_and_slope(logits, logit_scale, softcap)  # pyright: ignore
    # few tiles hold a label of their rows, and only the last ends beyond the vocabulary
    holds_label = (label >= v_start) & (label < v_start + columns)
    if (tl.max(holds_label.to(tl.int32), axis=0) > 0) | (v_start + columns > vocab_size):
        is_other = (column[None, :] != label[:, None]) & (column[None, :] < vocab_size)
        z = tl.where(is_other, z, float("-inf"))
    values = tl.exp2(z - reference[:, None])
    if odds is not None:
        odds.store([row_start, v_start], (values * slope).to(odds.dtype))
    return tl.sum(values, axis=1), tl.max(z, axis=1)


@triton.jit
def _odds_kernel(
    x,  # descriptor of (C, H)
    weight,  # descriptor of (V, H)
    odds,  # descriptor of (C, V); None: sums and maxima only
    labels_ptr,  # (C,)
    reference_ptr,  # (C,)
    partial_ptr,  # (2, T, C): sums of the tiles' odds, maxima of their z
    overflow_ptr,  # () int32
    counts_ptr,  # (1,) supervised tokens
    start,  # of them, where the chunk begins
    rows,
    hidden_size,
    vocab_size,
    softcap,
    logit_scale,
    ONLY_ON_OVERFLOW: tl.constexpr,
    GROUPED_TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_H: tl.constexpr,
):
    """Programs walk the tiles of the product together, each a tile of odds at a time."""
    if ONLY_ON_OVERFLOW:  # noqa: SIM102 - a constant and a value of the device
        if tl.load(overflow_ptr) == 0:
            return
    count = tl.minimum(tl.load(counts_ptr) - start, rows).to(tl.int32)
    row_tiles = tl.cdiv(count, TILE_ROWS)
    v_tiles = tl.cdiv(vocab_size, TILE_V)
    steps = tl.cdiv(hidden_size, TILE_H)
    group_tiles = GROUPED_TILES * v_tiles
    for tile in tl.range(tl.program_id(0), row_tiles * v_tiles, tl.num_programs(0), flatten=True):
        first = tile // group_tiles * GROUPED_TILES
        height = tl.minimum(row_tiles - first, GROUPED_TILES)
        row_start = (first + tile % group_tiles % height) * TILE_ROWS
        v_tile = tile % group_tiles // height
        v_start = v_tile * TILE_V

        logits = tl.zeros((TILE_ROWS, TILE_V), dtype=tl.float32)
        for step in range(steps):
            x_tile = x.load([row_start, step * TILE_H])
            weight_tile = weight.load([v_start, step * TILE_H])
            logits = tl.dot(x_tile, weight_tile.T, logits)

        row = row_start + tl.arange(0, TILE_ROWS)
        is_row = row < count
        reference = tl.load(reference_ptr + row, mask=is_row, other=0.0)
        label = tl.load(labels_ptr + row, mask=is_row, other=-1).to(tl.int32)
        # half a tile at a time: shared memory and registers for two programs on a processor
        halves = tl.permute(tl.reshape(logits, (TILE_ROWS, 2, TILE_V // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        left_sum, left_max = _write_odds(
            left,
            odds,
            reference,
            label,
            row_start,
            v_start,
            vocab_size,
            softcap,
            logit_scale,
        )
        right_sum, right_max = _write_odds(
            right,
            odds,
            reference,
            label,
            row_start,
            v_start + TILE_V // 2,
            vocab_size,
            softcap,
            logit_scale,
        )
        offsets = v_tile.to(tl.int64) * rows + row
        tl.store(partial_ptr + offsets, left_sum + right_sum, mask=is_row)
        offsets += v_tiles.to(tl.int64) * rows
        tl.store(partial_ptr + offsets, tl.maximum(left_max, right_max), mask=is_row)


@triton.jit
def _finish_kernel(
    partial_ptr,  # (2, T, C)
    labels_ptr,  # (C,)
    label_logit_ptr,  # (C,)
    label_z_ptr,  # (C,)
    reference_ptr,  # (C,)
    row_scale_ptr,  # (C,)
    class_weight_ptr,  # (V,) or None
    odds_ptr,  # (C, V) or None
    odds_stride,
    loss_ptr,  # (C,)
    factor_ptr,  # (C,)
    overflow_ptr,
    counts_ptr,
    start,
    rows,
    v_tiles,
    softcap,
    logit_scale,
    z_loss,
    ONLY_ON_OVERFLOW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """A few rows a program: losses, factors, what stands in the label's place, and where odds
    overflowed, the reference for another time.
    """
    if ONLY_ON_OVERFLOW:  # noqa: SIM102 - a constant and a value of the device
        if tl.load(overflow_ptr) == 0:
            return
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < tl.minimum(tl.load(counts_ptr) - start, rows)
    others = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for first in range(0, v_tiles, BLOCK_TILES):
        tile = (first + tl.arange(0, BLOCK_TILES)).to(tl.int64)
        mask = (tile[:, None] < v_tiles) & is_row[None, :]
        sums = tl.load(partial_ptr + tile[:, None] * rows + row[None, :], mask=mask, other=0.0)
        others += tl.sum(sums, axis=0)

    label = tl.load(labels_ptr + row, mask=is_row, other=0)
    reference = tl.load(reference_ptr + row, mask=is_row, other=0.0)
    z = tl.load(label_z_ptr + row, mask=is_row, other=0.0)
    label_odds = tl.exp2(z - reference)  # 1, but where the reference is not the label
    total = label_odds + others
    if not ONLY_ON_OVERFLOW:
        # not total < MAX_ODDS, for nan: the second time it is nan again
        overflows = is_row & ((total < MAX_ODDS) == 0)
        if tl.max(overflows.to(tl.int32), axis=0) > 0:
            highest = z
            for first in range(0, v_tiles, BLOCK_TILES):
                tile = (v_tiles + first + tl.arange(0, BLOCK_TILES)).to(tl.int64)
                mask = (tile[:, None] < 2 * v_tiles) & is_row[None, :]
                offsets = tile[:, None] * rows + row[None, :]
                maxima = tl.load(partial_ptr + offsets, mask=mask, other=float("-inf"))
                highest = tl.maximum(highest, tl.max(maxima, axis=0))
            tl.store(reference_ptr + row, tl.where(overflows, highest, reference), mask=is_row)
            tl.store(overflow_ptr, 1)

    # log(1 + others) to the last digit of small others: their own logarithm has it at total = 1
    rounded = total - label_odds
    log_total = tl.log(total)
    correction = (others - rounded) / total
    gap = log_total + correction + (reference - z) * LN_2
    lse = gap + z * LN_2
    label_share = tl.full((BLOCK_ROWS,), 1.0, dtype=tl.float32)
    if class_weight_ptr is not None:
        label_share = tl.load(class_weight_ptr + label, mask=is_row, other=0.0).to(tl.float32)
    rest_share = 2.0 * z_loss * lse
    tl.store(loss_ptr + row, label_share * gap + z_loss * lse * lse, mask=is_row)
    if odds_ptr is not None:
        row_scale = tl.load(row_scale_ptr + row, mask=is_row, other=0.0) * logit_scale
        share = label_share + rest_share
        factor = row_scale * share / total
        label_logit = tl.load(label_logit_ptr + row, mask=is_row, other=0.0)
        _, slope = _z_and_slope(label_logit, logit_scale, softcap)
        label_gradient = (rest_share * label_odds - label_share * others) * slope
        in_place = label_gradient / tl.where(share == 0.0, 1.0, share)
        in_place = in_place.to(odds_ptr.dtype.element_ty)
        # the label's own element is often as large as all others together: the factor takes over
        # what rounding takes from it
        rounded = in_place.to(tl.float32) * share
        is_zero = rounded == 0.0
        factor *= tl.where(is_zero, 1.0, label_gradient) / tl.where(is_zero, 1.0, rounded)
        offsets = row.to(tl.int64) * odds_stride + label
        tl.store(odds_ptr + offsets, in_place, mask=is_row)
        tl.store(factor_ptr + row, factor, mask=is_row)


def serves_odds(
    x: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,
    options: LossOptions,
) -> bool:
    """Whether this form computes the odds of such inputs: bf16 on Hopper, without bias and label
    smoothing, in rows that the tensor memory accelerator takes.

    float16 could not hold odds, and other GPUs have the products and the rows' kernel.
    """
    return (
        TensorDescriptor is not None
        and x.dtype == torch.bfloat16
        and _is_hopper(x.device)
        and bias is None
        and options.label_smoothing == 0.0
        and all(
            t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0
            for t in (x, weight)
        )
    )


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == HOPPER
    )


class OddsHead:
    """A head whose product writes odds. See ``heads.Head``."""

    needs_count = False
    needs_memory = False

    def __init__(
        self,
        x: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        tokens: Tokens,
        options: LossOptions,
    ) -> None:
        count, device = len(tokens.labels), x.device
        self._weight, self._tokens, self._options = weight, tokens, options
        self._weight_tiles = _tiles(weight, TILE_V, TILE_H)
        per_token = torch.empty(3, count, dtype=torch.float32, device=device)
        self._label_logits, self._label_z, self._reference = per_token.unbind()
        self._overflow = torch.zeros((), dtype=torch.int32, device=device)
        if count:
            with torch.cuda.device_of(x):
                _label_logit_kernel[(count,)](
                    x,
                    x.stride(0),
                    tokens.rows,
                    weight,
                    weight.stride(0),
                    tokens.labels,
                    tokens.counts,
                    self._label_logits,
                    self._label_z,
                    self._reference,
                    x.shape[1],
                    weight.shape[0],
                    options.softcap,
                    options.logit_scale,
                    **DOT,
                )

    def losses(
        self,
        x: Tensor,  # (C, H)
        start: int,
        *,
        memory: Tensor | None,  # (C, V)
        row_scale: Tensor | None,  # (C,) float32
    ) -> tuple[Tensor, Tensor | None]:
        rows, hidden_size = x.shape
        options = self._options
        vocab_size, device = self._weight.shape[0], x.device
        chunk, counts = slice(start, start + rows), self._tokens.counts
        labels, reference = self._tokens.labels[chunk], self._reference[chunk]
        v_tiles = -(-vocab_size // TILE_V)
        tiles = -(-rows // TILE_ROWS) * v_tiles
        partial = torch.empty(2, v_tiles, rows, dtype=torch.float32, device=device)
        losses, factors = torch.empty(2, rows, dtype=torch.float32, device=device).unbind()
        x_tiles = _tiles(x, TILE_ROWS, TILE_H)
        odds = odds_tiles = odds_stride = None
        if row_scale is not None and memory is not None:
            odds, odds_stride = memory, memory.stride(0)
            odds_tiles = _tiles(odds, TILE_ROWS, TILE_V // 2)
        overflow_is_possible = 2 * (options.softcap or math.inf) > MAX_GAP
        with torch.cuda.device_of(x):
            for only_on_overflow in (False, True) if overflow_is_possible else (False,):
                again: dict[str, Any] = {"ONLY_ON_OVERFLOW": only_on_overflow}
                _odds_kernel[(min(tiles, PROGRAMS * _processors(device)),)](
                    x_tiles,
                    self._weight_tiles,
                    odds_tiles,
                    labels,
                    reference,
                    partial,
                    self._overflow,
                    counts,
                    start,
                    rows,
                    hidden_size,
                    vocab_size,
                    options.softcap,
                    options.logit_scale,
                    **again,
                    **_tile_constants(hidden_size),
                )
                _finish_kernel[(-(-rows // FINISHED["BLOCK_ROWS"]),)](
                    partial,
                    labels,
                    self._label_logits[chunk],
                    self._label_z[chunk],
                    reference,
                    row_scale,
                    options.class_weight,
                    odds,
                    odds_stride,
                    losses,
                    factors,
                    self._overflow,
                    counts,
                    start,
                    rows,
                    v_tiles,
                    options.softcap,
                    options.logit_scale,
                    options.z_loss,
                    **again,
                    **FINISHED,
                )
        return losses, None if odds is None else factors


def _tiles(matrix: Tensor, rows: int, columns: int) -> object:
    """Descriptor of a matrix in tiles of a shape."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])  # pyright: ignore[reportOptionalMemberAccess]


@functools.cache
def _tile_constants(hidden_size: int) -> dict[str, Any]:
    fitting = max(1, min(MAX_GROUPED_TILES, GROUPED_COLUMNS // hidden_size))
    return TILES | {"GROUPED_TILES": 1 << (fitting - 1).bit_length()}


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type == "cpu":  # Triton's interpreter
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
