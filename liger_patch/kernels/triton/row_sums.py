"""Triton form of rows of logits in two walks. The formulas are in ``head/row_sums``.

One program walks a row once, with a running maximum; and once more, when the numbers of all ranks
are there, to turn each logit into its gradient in place. C: rows, V_r: classes of this rank, or all
of them. Extra memory: none. Running maximum: Milakov and Gimelshein (arXiv:1805.02867).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.triton.cross_entropy import LOWEST, block_and_warps
from liger_patch.kernels.triton.launch import launch
from liger_patch.kernels.triton.softcap import (
    apply_softcap,
    distance_from_max,
    tanh_derivative,
)


@triton.jit
def _row_sums_kernel(
    logits_ptr,  # (C, V_r)
    logits_stride,
    labels_ptr,  # (C,) outside [0, V_r) where another rank's
    class_weight_ptr,  # (V_r,) or None
    highest_ptr,  # (C,) as all that follow
    others_ptr,
    label_distance_ptr,
    weighted_ptr,  # or None, as the next
    weight_sum_ptr,
    moment_ptr,  # or None
    squares_ptr,  # or None, as the next two
    z_sum_ptr,
    top_ptr,
    vocab_size,
    softcap,  # or None
    logit_scale,
    BLOCK_V: tl.constexpr,
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    columns = tl.arange(0, BLOCK_V)
    label = tl.load(labels_ptr + row)

    running_max = LOWEST
    others = 0.0  # sum of exp(z - running_max) without the label's
    weighted = 0.0  # sum of w (z - running_max)
    weight_sum = 0.0
    total = 0.0  # sum of exp(z - running_max)
    moment = 0.0  # sum of (z - running_max) exp(z - running_max)
    squares = 0.0
    z_sum = 0.0
    top = 0  # the first class with the largest z
    for start in range(0, vocab_size, BLOCK_V):
        mask = start + columns < vocab_size
        x = tl.load(logits_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        z = tl.where(mask, apply_softcap(x * logit_scale, softcap), float("-inf"))
        block_max = tl.max(z, axis=0)
        new_max = tl.maximum(running_max, block_max)
        lowered = running_max - new_max
        factor = tl.exp(lowered)
        distance = distance_from_max(x, new_max, softcap, logit_scale)
        distance = tl.where(mask, distance, float("-inf"))
        parts = tl.exp(distance)
        if weighted_ptr is not None:
            weights = tl.where(mask, 1.0, 0.0)
            if class_weight_ptr is not None:
                weights = tl.load(class_weight_ptr + start + columns, mask=mask, other=0.0)
                weights = weights.to(tl.float32)
            weighted += weight_sum * lowered
            weighted += tl.sum(weights * tl.where(mask, distance, 0.0), axis=0)
            weight_sum += tl.sum(weights, axis=0)
        if moment_ptr is not None:
            moment = factor * (moment + tl.where(total > 0, lowered * total, 0.0))
            moment += tl.sum(parts * tl.maximum(distance, LOWEST), axis=0)  # 0 * -inf is nan
            total = factor * total + tl.sum(parts, axis=0)
        if squares_ptr is not None:
            squares = factor * factor * squares + tl.sum(parts * parts, axis=0)
            z_sum += tl.sum(tl.where(mask, z, 0.0), axis=0)
            first = tl.min(tl.where(z == block_max, start + columns, vocab_size), axis=0)
            top = tl.where(block_max > running_max, first, top)
        if (label >= start) & (label < start + BLOCK_V):
            parts = tl.where(columns == label - start, 0.0, parts)
        others = others * factor + tl.sum(parts, axis=0)
        running_max = new_max

    is_own = (label >= 0) & (label < vocab_size)
    label_x = tl.load(logits_ptr + label, mask=is_own, other=0.0).to(tl.float32)
    label_distance = distance_from_max(label_x, running_max, softcap, logit_scale)
    tl.store(highest_ptr + row, running_max)
    tl.store(others_ptr + row, others)
    tl.store(label_distance_ptr + row, tl.where(is_own, label_distance, float("-inf")))
    if weighted_ptr is not None:
        tl.store(weighted_ptr + row, weighted)
        tl.store(weight_sum_ptr + row, weight_sum)
    if moment_ptr is not None:
        tl.store(moment_ptr + row, moment)
    if squares_ptr is not None:
        tl.store(squares_ptr + row, squares)
        tl.store(z_sum_ptr + row, z_sum)
        tl.store(top_ptr + row, (top - label).to(tl.float32))


@triton.jit
def _row_gradients_kernel(
    logits_ptr,  # (C, V_r)
    logits_stride,
    labels_ptr,  # (C,) outside [0, V_r) where another rank's
    class_weight_ptr,  # (V_r,) or None
    highest_ptr,  # (C,) as all that follow
    factor_ptr,
    label_gradient_ptr,
    smooth_ptr,  # or None
    entropy_factor_ptr,  # or None
    mean_distance_ptr,  # None without the one before
    vocab_size,
    softcap,  # or None
    logit_scale,
    BLOCK_V: tl.constexpr,
):
    """One program per row, which it overwrites."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    columns = tl.arange(0, BLOCK_V)
    label = tl.load(labels_ptr + row)
    highest = tl.load(highest_ptr + row)
    factor = tl.load(factor_ptr + row)
    label_gradient = tl.load(label_gradient_ptr + row)
    for start in range(0, vocab_size, BLOCK_V):
        mask = start + columns < vocab_size
        x = tl.load(
            logits_ptr + start + columns, mask=mask, other=0.0, eviction_policy="evict_first"
        )
        x = x.to(tl.float32)
        distance = distance_from_max(x, highest, softcap, logit_scale)
        odds = tl.exp(distance)
        gradient = factor * odds
        if entropy_factor_ptr is not None:
            deviation = tl.where(odds > 0, tl.load(mean_distance_ptr + row) - distance, 0.0)
            gradient += tl.load(entropy_factor_ptr + row) * odds * deviation
        if smooth_ptr is not None:
            weights = tl.full((BLOCK_V,), 1.0, dtype=tl.float32)
            if class_weight_ptr is not None:
                weights = tl.load(class_weight_ptr + start + columns, mask=mask, other=0.0)
                weights = weights.to(tl.float32)
            gradient -= tl.load(smooth_ptr + row) * weights
        if (label >= start) & (label < start + BLOCK_V):
            gradient = tl.where(columns == label - start, label_gradient, gradient)
        if softcap is not None:
            gradient *= tanh_derivative(x * logit_scale / softcap)
        tl.store(logits_ptr + start + columns, gradient, mask=mask)


def row_sums(
    logits: Tensor,  # (C, V_r)
    labels: Tensor,  # (C,)
    options: LossOptions,
    class_weight: Tensor | None,  # (V_r,)
    *sums: Tensor | None,  # (C,) float32
) -> None:
    """Write the fields of ``RowSums``, in their order; None for those that are not wanted."""
    _launch(_row_sums_kernel, logits, labels, options, class_weight, sums)


def row_gradients_(
    logits: Tensor,  # (C, V_r)
    labels: Tensor,  # (C,)
    options: LossOptions,
    class_weight: Tensor | None,  # (V_r,)
    *gradients: Tensor | None,  # (C,) float32
) -> None:
    """Turn raw logits into the gradient by them, by the fields of ``RowGradients``."""
    _launch(_row_gradients_kernel, logits, labels, options, class_weight, gradients)


def _launch(
    kernel: triton.runtime.JITFunction,
    logits: Tensor,
    labels: Tensor,
    options: LossOptions,
    class_weight: Tensor | None,
    numbers: tuple[Tensor | None, ...],
) -> None:
    rows, vocab_size = logits.shape
    if not rows:
        return
    block_v, num_warps = block_and_warps(max(1, vocab_size), 64 if torch.version.hip else 32)
    launch(
        kernel,
        (rows,),
        logits,
        logits.stride(0),
        labels,
        class_weight,
        *numbers,
        vocab_size,
        options.softcap,
        options.logit_scale,
        BLOCK_V=block_v,
        num_warps=num_warps,
    )
