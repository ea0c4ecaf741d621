"""Triton form of the cross entropy of rows: (C, V) logits to losses and, in place, to gradients.

The formula is in ``options``. One program walks one row twice: the first walk finds the
log-sum-exp with a running maximum, the second turns each logit into its gradient, so a row is read
from memory once and from the L2 cache once, and written once. C: rows, V: vocabulary. Extra memory:
one float a row. Running maximum: Milakov and Gimelshein, "Online normalizer calculation for
softmax" (arXiv:1805.02867).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.triton.launch import launch
from liger_patch.kernels.triton.softcap import (
    apply_softcap,
    distance_from_max,
    tanh_derivative,
)

MAX_BLOCK_V = 8192  # logits that a program holds at a time
ELEMENTS_PER_THREAD = 16  # of one block: two 16-byte loads of bf16
MAX_THREADS = 512
# below every finite bf16 or fp32 logit that matters, and finite: -inf - -inf is nan
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,  # (C, V)
    logits_stride,
    dlogits_ptr,  # (C, V), may be logits_ptr; None: losses only
    dlogits_stride,
    labels_ptr,  # (C,)
    row_scale_ptr,  # (C,) factor on each row's gradient; None without gradient
    class_weight_ptr,  # (V,) or None
    loss_ptr,  # (C,)
    vocab_size,
    ignore_index,
    softcap,  # or None
    logit_scale,
    label_smoothing,  # or None
    z_loss,
    BLOCK_V: tl.constexpr,
):
    """One program per row: its loss, and its gradient times the row's scale."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    columns = tl.arange(0, BLOCK_V)
    label = tl.load(labels_ptr + row)

    if label == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if dlogits_ptr is not None:
            zeros = tl.zeros((BLOCK_V,), dtype=tl.float32)
            for start in range(0, vocab_size, BLOCK_V):
                mask = start + columns < vocab_size
                tl.store(dlogits_ptr + row * dlogits_stride + start + columns, zeros, mask=mask)
        return

    label_x = tl.load(logits_ptr + label).to(tl.float32)
    label_weight = 1.0
    if class_weight_ptr is not None:
        label_weight = tl.load(class_weight_ptr + label).to(tl.float32)

    # first walk: log-sum-exp, and the sums that label smoothing needs; the maximum stays apart from
    # the logarithm of the sum, which would be rounded to the maximum's last digit. Arithmetic takes
    # the time: only the block at the end is masked, only the label's block looks for the label. The
    # L2 cache is asked to keep what the second walk will read again, and nothing after that
    running_max = LOWEST
    running_sum = 0.0  # without the label's part: near p = 1, p - 1 would cancel
    weighted_logits = 0.0  # sum_v w_v (z_v - running_max)
    weight_sum = 0.0  # sum_v w_v
    for start in range(0, vocab_size, BLOCK_V):
        if start + BLOCK_V <= vocab_size:
            x = tl.load(logits_ptr + start + columns, eviction_policy="evict_last")
            x = x.to(tl.float32)
            z = apply_softcap(x * logit_scale, softcap)
            new_max = tl.maximum(running_max, tl.max(z, axis=0))
            distance = distance_from_max(x, new_max, softcap, logit_scale)
        else:
            mask = start + columns < vocab_size
            x = tl.load(logits_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
            z = tl.where(mask, apply_softcap(x * logit_scale, softcap), float("-inf"))
            new_max = tl.maximum(running_max, tl.max(z, axis=0))
            distance = distance_from_max(x, new_max, softcap, logit_scale)
            distance = tl.where(mask, distance, float("-inf"))
        parts = tl.exp(distance)
        if (label >= start) & (label < start + BLOCK_V):
            parts = tl.where(columns == label - start, 0.0, parts)
        running_sum = running_sum * tl.exp(running_max - new_max) + tl.sum(parts, axis=0)
        if label_smoothing is not None:
            mask = start + columns < vocab_size
            weights = tl.where(mask, 1.0, 0.0)
            if class_weight_ptr is not None:
                weights = tl.load(class_weight_ptr + start + columns, mask=mask, other=0.0)
                weights = weights.to(tl.float32)
            weighted_logits += weight_sum * (running_max - new_max)
            weighted_logits += tl.sum(weights * tl.where(mask, distance, 0.0), axis=0)
            weight_sum += tl.sum(weights, axis=0)
        running_max = new_max
    label_distance = distance_from_max(label_x, running_max, softcap, logit_scale)
    label_part = tl.exp(label_distance)
    total = running_sum + label_part
    log_sum = tl.log(total)
    lse = running_max + log_sum

    label_share = label_weight
    smooth_share = 0.0
    if label_smoothing is not None:
        label_share = label_weight * (1.0 - label_smoothing)
        smooth_share = label_smoothing / vocab_size
    loss = label_share * (log_sum - label_distance) + z_loss * lse * lse
    if label_smoothing is not None:
        loss += smooth_share * (weight_sum * log_sum - weighted_logits)
    tl.store(loss_ptr + row, loss)

    # second walk: dloss/dx_v = dz_v/dx_v times
    # label_share (p_v - [v = y]) + rest_share p_v - smooth_share w_v
    if dlogits_ptr is not None:
        tl.debug_barrier()  # every warp has read the label's logit before any warp overwrites it
        dlogits_ptr += row * dlogits_stride
        row_scale = tl.load(row_scale_ptr + row) * logit_scale
        rest_share = 2.0 * z_loss * lse
        if label_smoothing is not None:
            rest_share += smooth_share * weight_sum
        share = (label_share + rest_share) / total * row_scale
        smooth_scale = smooth_share * row_scale
        for start in range(0, vocab_size, BLOCK_V):
            is_whole = start + BLOCK_V <= vocab_size
            mask = start + columns < vocab_size
            if is_whole:
                x = tl.load(logits_ptr + start + columns, eviction_policy="evict_first")
                x = x.to(tl.float32)
            else:
                x = tl.load(logits_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
            distance = distance_from_max(x, running_max, softcap, logit_scale)
            gradient = share * tl.exp(distance)
            if label_smoothing is not None:
                weights = tl.full((BLOCK_V,), 1.0, dtype=tl.float32)
                if class_weight_ptr is not None:
                    weights = tl.load(class_weight_ptr + start + columns, mask=mask, other=0.0)
                    weights = weights.to(tl.float32)
                gradient -= smooth_scale * weights
            if softcap is not None:
                gradient *= tanh_derivative(x * logit_scale / softcap)
            if is_whole:
                tl.store(dlogits_ptr + start + columns, gradient, eviction_policy="evict_first")
            else:
                tl.store(dlogits_ptr + start + columns, gradient, mask=mask)

        label_gradient = (rest_share * label_part - label_share * running_sum) / total
        if label_smoothing is not None:
            label_gradient -= smooth_share * label_weight
        if softcap is not None:
            label_gradient *= tanh_derivative(label_x * logit_scale / softcap)
        tl.debug_barrier()  # the walk has written something else there
        tl.store(dlogits_ptr + label, label_gradient * row_scale)


def block_and_warps(vocab_size: int, warp_size: int = 32) -> tuple[int, int]:
    """Return logits per block, and warps per program, for a row of ``vocab_size`` logits."""
    block_v = min(MAX_BLOCK_V, 1 << (vocab_size - 1).bit_length())
    threads = min(MAX_THREADS, max(warp_size, block_v // ELEMENTS_PER_THREAD))
    return block_v, threads // warp_size


def cross_entropy_rows(
    logits: Tensor,  # (C, V)
    labels: Tensor,  # (C,)
    options: LossOptions,
    *,
    losses: Tensor | None = None,  # (C,)
    dlogits: Tensor | None = None,  # (C, V)
    row_scale: Tensor | None = None,  # (C,) float32
) -> Tensor:
    """Return losses (C,) in float32; write gradients times ``row_scale`` to ``dlogits``, which may
    be ``logits``.
    """
    rows, vocab_size = logits.shape
    if losses is None:
        losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return losses
    class_weight = options.class_weight
    block_v, num_warps = block_and_warps(vocab_size, 64 if torch.version.hip else 32)
    launch(
        _cross_entropy_kernel,
        (rows,),
        logits,
        logits.stride(0),
        dlogits,
        0 if dlogits is None else dlogits.stride(0),
        labels.contiguous(),
        None if row_scale is None else row_scale.contiguous(),
        None if class_weight is None else class_weight.contiguous(),
        losses,
        vocab_size,
        options.ignore_index,
        options.softcap,
        options.logit_scale,
        options.label_smoothing or None,
        options.z_loss,
        BLOCK_V=block_v,
        num_warps=num_warps,
    )
    return losses
