"""Triton form of a head's matrix product and softmax in one: hidden states to odds, on Hopper.

The odds of class v against the label y of its token, and what follows from them:

    odds_v = exp(z_v - z_y)        others = sum over v != y of odds_v
    loss   = log(1 + others)       dloss/dz_v = odds_v / (1 + others), v != y

with z the logits of ``options``. Nothing of a row is needed before its odds can be written but
z_y, a dot product of its own. So the product's tiles leave the registers as odds, and no kernel
walks the logits: but for the labels, the gradient is ``factors[:, None] * odds``, and a product
with a diagonal factor needs no pass over the odds either. The odds of the labels are written as 0:
their part, often as large as all others together, is added in float32. The logits are never rounded
to 16 bits.

Where a token's loss exceeds 60 nats, its odds might overflow: then the device computes the chunk
again, without the host, such rows against their largest logit.

C: rows, H: hidden size, R: rank of an adapter on the head, V: vocabulary, T: tiles of TILE_V
columns. Extra memory: 2 C T floats, 3 C T with statistics. The idea that a row needs no maximum if
another reference is at hand follows Milakov and Gimelshein (arXiv:1805.02867), the label in place
of the maximum. The nearest relative is the ``scaled_exp`` of QuACK's chunked linear cross entropy.
"""

import math

import triton
import triton.language as tl

MAX_ODDS = tl.constexpr(2.0**86)  # of a row: e^60; factors and odds stay far within float32
LOWEST = tl.constexpr(-1.0e38)
LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))


@triton.jit
def z_and_slope(x, logit_scale, softcap):
    """Return z times log2(e), and dz/dx over logit_scale, of raw logits x."""
    slope = 1.0
    if softcap is not None:
        # tanh(u) = 1 - 2 r with r = 1 / (1 + exp(2 u)): off by 2e-7 at most. A root and a square
        # are two instructions, a division is eight. The slope loses digits where tanh(u) nears -1:
        # there, odds and slope are next to nothing
        root = tl.rsqrt(1.0 + tl.exp2(x * (2.0 * LOG2_E * logit_scale / softcap)))
        r = root * root
        z = softcap * LOG2_E - (2.0 * softcap * LOG2_E) * r
        slope = 4.0 * (r - r * r)
    else:
        z = x * (logit_scale * LOG2_E)
    return z, slope


@triton.jit
def log_of_sum(label_odds, others):
    """Compute log(label_odds + others) to the last digit of small others."""
    total = label_odds + others
    rounded = total - label_odds  # what the sum kept of others; the rest is added, to first order
    return tl.log(total) + (others - rounded) / total


@triton.jit
def _products(a_ptr, b_ptr, size, BLOCK: tl.constexpr):
    """Sum the products of two rows, for each place of a block."""
    columns = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, size, BLOCK):
        mask = start + columns < size
        a = tl.load(a_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        total += a * b
    return total


@triton.jit
def label_logit_kernel(
    x_ptr,  # (N, H)
    x_stride,
    rows_ptr,  # (N,) of x for each token
    weight_ptr,  # (V, H)
    weight_stride,
    low_rank_ptr,  # (N, R) or None
    low_rank_stride,
    low_rank_weight_ptr,  # (V, R) or None
    low_rank_weight_stride,
    labels_ptr,  # (N,)
    counts_ptr,  # (2,), the first: supervised tokens
    label_logit_ptr,  # (N,) raw
    label_z_ptr,  # (N,) times log2(e)
    reference_ptr,  # (N,) the same
    overflow_ptr,  # () int32, see ``odds_kernel``: 0 before the first chunk
    hidden_size,
    rank,
    vocab_size,
    softcap,  # None for none
    logit_scale,
    BLOCK_H: tl.constexpr,
):
    """One program per token: its label's logit, 0 for a label that the host refuses later. The
    first program clears the overflow flag.
    """
    token = tl.program_id(0).to(tl.int64)
    if token == 0:
        tl.store(overflow_ptr, 0)
    if token >= tl.load(counts_ptr):
        return
    label = tl.load(labels_ptr + token)
    if (label < 0) | (label >= vocab_size):
        tl.store(label_logit_ptr + token, 0.0)
        tl.store(label_z_ptr + token, 0.0)
        tl.store(reference_ptr + token, 0.0)
        return
    row = tl.load(rows_ptr + token)
    products = _products(
        x_ptr + row * x_stride, weight_ptr + label * weight_stride, hidden_size, BLOCK_H
    )
    if low_rank_ptr is not None:
        low_rank_ptr += row * low_rank_stride
        low_rank_weight_ptr += label * low_rank_weight_stride
        products += _products(low_rank_ptr, low_rank_weight_ptr, rank, BLOCK_H)
    logit = tl.sum(products, axis=0)
    z, _ = z_and_slope(logit, logit_scale, softcap)
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
    SUMS: tl.constexpr,
):
    """Write the odds of raw logits; return in each row their sum, the largest z, and with three
    SUMS the sum of the odds times log2(odds).
    """
    columns: tl.constexpr = logits.shape[1]
    column = v_start + tl.arange(0, columns)
    z, slope = z_and_slope(logits, logit_scale, softcap)  # pyright: ignore
    # few tiles hold a label of their rows, and only the last ends beyond the vocabulary
    holds_label = (label >= v_start) & (label < v_start + columns)
    if (tl.max(holds_label.to(tl.int32), axis=0) > 0) | (v_start + columns > vocab_size):
        is_other = (column[None, :] != label[:, None]) & (column[None, :] < vocab_size)
        z = tl.where(is_other, z, float("-inf"))
    distance = z - reference[:, None]
    values = tl.exp2(distance)
    if odds is not None:
        odds.store([row_start, v_start], (values * slope).to(odds.dtype))
    total = tl.sum(values, axis=1)
    moment = total
    if SUMS == 3:
        moment = tl.sum(values * tl.maximum(distance, LOWEST), axis=1)  # 0 * -inf is nan
    return total, tl.max(z, axis=1), moment


@triton.jit
def _write_parts(
    logits,  # (rows, columns)
    odds,
    reference,
    label,
    row_start,
    v_start,
    vocab_size,
    softcap,
    logit_scale,
    SUMS: tl.constexpr,
    PART_V: tl.constexpr,
):
    """Call ``_write_odds``, PART_V columns at a time."""
    rows: tl.constexpr = logits.shape[0]
    half_v: tl.constexpr = logits.shape[1] // 2
    if half_v < PART_V:
        return _write_odds(
            logits,
            odds,
            reference,
            label,
            row_start,
            v_start,
            vocab_size,
            softcap,
            logit_scale,
            SUMS,
        )
    else:
        halves = tl.permute(tl.reshape(logits, (rows, 2, half_v)), (0, 2, 1))
        left, right = tl.split(halves)
        left_sum, left_max, left_moment = _write_parts(  # pyright: ignore[reportGeneralTypeIssues]
            left,
            odds,
            reference,
            label,
            row_start,
            v_start,
            vocab_size,
            softcap,
            logit_scale,
            SUMS,
            PART_V,
        )
        right_sum, right_max, right_moment = _write_parts(
            right,
            odds,
            reference,
            label,
            row_start,
            v_start + half_v,
            vocab_size,
            softcap,
            logit_scale,
            SUMS,
            PART_V,
        )
        highest = tl.maximum(left_max, right_max)
        return left_sum + right_sum, highest, left_moment + right_moment


@triton.jit(do_not_specialize=["start", "rows", "only_on_overflow"])
def odds_kernel(
    x,  # descriptor of (C, H)
    weight,  # descriptor of (V, H)
    low_rank,  # descriptor of (C, R), all of R a tile; None for none
    low_rank_weight,  # descriptor of (V, R)
    odds,  # descriptor of (C, V); None: sums and maxima only
    labels_ptr,  # (C,)
    reference_ptr,  # (C,)
    partial_ptr,  # (T, SUMS, C): of the tiles' odds sums, maxima of their z, see _write_odds
    overflow_ptr,  # () int32, start + 1 of the chunk that overflowed last
    counts_ptr,  # (2,), the first: supervised tokens
    start,  # of them, where the chunk begins
    only_on_overflow,  # 1: return unless the chunk has overflowed; no constant, compiled once
    rows,
    hidden_size,
    vocab_size,
    softcap,
    logit_scale,
    SUMS: tl.constexpr,
    GROUPED_TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_H: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One tile of odds per program at a time: programs walk the tiles of the product together."""
    if only_on_overflow != 0:  # noqa: SIM102 - the second is loaded only then
        if tl.load(overflow_ptr) != start + 1:
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
        if low_rank is not None:
            low_rank_tile = low_rank.load([row_start, 0])
            logits = tl.dot(low_rank_tile, low_rank_weight.load([v_start, 0]).T, logits)

        row = row_start + tl.arange(0, TILE_ROWS)
        is_row = row < count
        reference = tl.load(reference_ptr + row, mask=is_row, other=0.0)
        label = tl.load(labels_ptr + row, mask=is_row, other=-1).to(tl.int32)
        # a part of a tile at a time: shared memory and registers for two programs on a processor
        sums, highest, moments = _write_parts(
            logits,
            odds,
            reference,
            label,
            row_start,
            v_start,
            vocab_size,
            softcap,
            logit_scale,
            SUMS,
            TILE_V // PARTS,
        )
        offsets = v_tile.to(tl.int64) * SUMS * rows + row
        tl.store(partial_ptr + offsets, sums, mask=is_row)
        tl.store(partial_ptr + offsets + rows, highest, mask=is_row)
        if SUMS == 3:
            tl.store(partial_ptr + offsets + 2 * rows, moments, mask=is_row)


@triton.jit(do_not_specialize=["start", "rows", "only_on_overflow"])
def finish_kernel(
    partial_ptr,  # (T, SUMS, C), of tiles
    labels_ptr,  # (C,)
    label_logit_ptr,  # (C,)
    label_z_ptr,  # (C,)
    reference_ptr,  # (C,)
    row_scale_ptr,  # (C,) or None
    class_weight_ptr,  # (V,) or None
    loss_ptr,  # (C,)
    factor_ptr,  # (C,)
    label_gradient_ptr,  # (C,)
    entropy_ptr,  # (C,) or None: no statistics
    lse_ptr,  # (C,)
    is_top1_ptr,  # (C,) bool
    overflow_ptr,
    counts_ptr,
    start,
    only_on_overflow,
    rows,
    v_tiles,
    vocab_size,
    softcap,
    logit_scale,
    z_loss,
    SUMS: tl.constexpr,  # 3 for statistics
    TILE_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """One program per few rows: losses, factors, the labels' gradients, statistics, and where odds
    overflowed, the reference for the second time.
    """
    if only_on_overflow != 0:  # noqa: SIM102 - the second is loaded only then
        if tl.load(overflow_ptr) != start + 1:
            return
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < tl.minimum(tl.load(counts_ptr) - start, rows)
    others = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for first in range(0, v_tiles, BLOCK_TILES):
        tile = (first + tl.arange(0, BLOCK_TILES)).to(tl.int64)
        mask = (tile[:, None] < v_tiles) & is_row[None, :]
        offsets = tile[:, None] * SUMS * rows + row[None, :]
        sums = tl.load(partial_ptr + offsets, mask=mask, other=0.0)
        others += tl.sum(sums, axis=0)

    label = tl.load(labels_ptr + row, mask=is_row, other=0)
    reference = tl.load(reference_ptr + row, mask=is_row, other=0.0)
    z = tl.load(label_z_ptr + row, mask=is_row, other=0.0)
    label_odds = tl.exp2(z - reference)  # 1, but where the reference is not the label
    total = label_odds + others
    if only_on_overflow == 0:
        # not total < MAX_ODDS, for nan: the second time it is nan again
        overflows = is_row & ((total < MAX_ODDS) == 0)
        if tl.max(overflows.to(tl.int32), axis=0) > 0:
            highest = z
            for first in range(0, v_tiles, BLOCK_TILES):
                tile = (first + tl.arange(0, BLOCK_TILES)).to(tl.int64)
                mask = (tile[:, None] < v_tiles) & is_row[None, :]
                offsets = (tile[:, None] * SUMS + 1) * rows + row[None, :]
                maxima = tl.load(partial_ptr + offsets, mask=mask, other=float("-inf"))
                highest = tl.maximum(highest, tl.max(maxima, axis=0))
            tl.store(reference_ptr + row, tl.where(overflows, highest, reference), mask=is_row)
            tl.store(overflow_ptr, start + 1)

    log_sum = log_of_sum(label_odds, others)
    gap = log_sum + (reference - z) * LN_2
    lse = log_sum + reference * LN_2
    label_share = tl.full((BLOCK_ROWS,), 1.0, dtype=tl.float32)
    if class_weight_ptr is not None:
        # the host may not have refused the labels yet
        is_class = is_row & (label >= 0) & (label < vocab_size)
        label_share = tl.load(class_weight_ptr + label, mask=is_class, other=0.0).to(tl.float32)
    rest_share = 2.0 * z_loss * lse
    tl.store(loss_ptr + row, label_share * gap + z_loss * lse * lse, mask=is_row)
    if entropy_ptr is not None:
        moment = label_odds * (z - reference)
        before = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
        after = before
        for first in range(0, v_tiles, BLOCK_TILES):
            tile = (first + tl.arange(0, BLOCK_TILES)).to(tl.int64)
            mask = (tile[:, None] < v_tiles) & is_row[None, :]
            offsets = (tile[:, None] * SUMS + 1) * rows + row[None, :]
            maxima = tl.load(partial_ptr + offsets, mask=mask, other=float("-inf"))
            is_after = tile[:, None] * TILE_V > label[None, :]
            before = tl.maximum(before, tl.max(tl.where(is_after, float("-inf"), maxima), axis=0))
            after = tl.maximum(after, tl.max(tl.where(is_after, maxima, float("-inf")), axis=0))
            moments = tl.load(partial_ptr + offsets + rows, mask=mask, other=0.0)
            moment += tl.sum(moments, axis=0)
        tl.store(entropy_ptr + row, log_sum - moment / total * LN_2, mask=is_row)
        tl.store(lse_ptr + row, lse, mask=is_row)
        # of several largest the first; within the label's own tile, none is
        tl.store(is_top1_ptr + row, (z > before) & (z >= after), mask=is_row)
    if row_scale_ptr is not None:
        scale = tl.load(row_scale_ptr + row, mask=is_row, other=0.0) * logit_scale / total
        label_logit = tl.load(label_logit_ptr + row, mask=is_row, other=0.0)
        _, slope = z_and_slope(label_logit, logit_scale, softcap)
        label_gradient = (rest_share * label_odds - label_share * others) * slope * scale
        tl.store(factor_ptr + row, (label_share + rest_share) * scale, mask=is_row)
        tl.store(label_gradient_ptr + row, label_gradient, mask=is_row)
