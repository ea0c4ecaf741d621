"""Triton form of the statistics of tokens. The formulas are in ``token_statistics``.

One program walks a row of logits once, with a running maximum, or twice, to turn it into its
gradient: the second time it comes from the L2 cache. C: rows, V: vocabulary. Extra memory: none.
Running maximum: Milakov and Gimelshein (arXiv:1805.02867).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.triton.cross_entropy import LOWEST, block_and_warps
from liger_patch.kernels.triton.softcap import (
    apply_softcap,
    distance_from_max,
    tanh_derivative,
)


@triton.jit
def _with_block(x, mask, running_max, total, moment, softcap, logit_scale):
    """Add a block to the running sums of a row, and return them.

    They are the largest z, the sums of exp(z - largest) and of (z - largest) exp(z - largest), the
    factor on each exp before, and the block's own exps.
    """
    z = apply_softcap(x * logit_scale, softcap)
    new_max = tl.maximum(running_max, tl.max(tl.where(mask, z, float("-inf")), axis=0))
    lowered = running_max - new_max
    factor = tl.exp(lowered)
    distance = distance_from_max(x, new_max, softcap, logit_scale)
    distance = tl.where(mask, distance, float("-inf"))
    parts = tl.exp(distance)
    moment = factor * (moment + tl.where(total > 0, lowered * total, 0.0))
    moment += tl.sum(parts * tl.maximum(distance, LOWEST), axis=0)  # 0 * -inf is nan
    total = factor * total + tl.sum(parts, axis=0)
    return new_max, total, moment, factor, parts


@triton.jit
def _token_statistics_kernel(
    logits_ptr,  # (C, V)
    logits_stride,
    labels_ptr,  # (C,)
    entropy_ptr,  # (C,)
    lse_ptr,  # (C,)
    is_top1_ptr,  # (C,) bool
    mean_logits_ptr,  # (C,)
    log_sum_sq_probs_ptr,  # (C,)
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
    label_x = tl.load(logits_ptr + label).to(tl.float32)
    label_z = apply_softcap(label_x * logit_scale, softcap)

    running_max = LOWEST
    before_label = float("-inf")  # largest of the classes before the label
    total = 0.0  # sum of exp(z - running_max)
    moment = 0.0  # sum of (z - running_max) exp(z - running_max)
    squares = 0.0  # sum of exp(z - running_max)^2
    z_sum = 0.0
    for start in range(0, vocab_size, BLOCK_V):
        mask = start + columns < vocab_size
        x = tl.load(logits_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        z = apply_softcap(x * logit_scale, softcap)
        z_sum += tl.sum(tl.where(mask, z, 0.0), axis=0)
        z = tl.where(mask, z, float("-inf"))
        is_before = start + columns < label
        before_label = tl.maximum(
            before_label, tl.max(tl.where(is_before, z, float("-inf")), axis=0)
        )
        running_max, total, moment, factor, parts = _with_block(
            x, mask, running_max, total, moment, softcap, logit_scale
        )
        squares = factor * factor * squares + tl.sum(parts * parts, axis=0)
    log_total = tl.log(total)
    tl.store(lse_ptr + row, running_max + log_total)
    tl.store(entropy_ptr + row, log_total - moment / total)
    tl.store(is_top1_ptr + row, (label_z >= running_max) & (label_z > before_label))
    tl.store(mean_logits_ptr + row, z_sum / vocab_size)
    tl.store(log_sum_sq_probs_ptr + row, tl.log(squares) - 2.0 * log_total)


@triton.jit
def _log_probs_gradient_kernel(
    logits_ptr,  # (C, V)
    logits_stride,
    labels_ptr,  # (C,)
    dlog_probs_ptr,  # (C,) or None
    dentropy_ptr,  # (C,) or None
    dlse_ptr,  # (C,) or None
    vocab_size,
    softcap,  # or None
    logit_scale,
    BLOCK_V: tl.constexpr,
):
    """One program per row, which it overwrites."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    columns = tl.arange(0, BLOCK_V)

    # first walk: the softmax of these logits as they are rounded. The maximum stays apart from the
    # logarithm of the sum, which would be rounded to the maximum's last digit
    running_max = LOWEST
    total = 0.0
    moment = 0.0
    for start in range(0, vocab_size, BLOCK_V):
        mask = start + columns < vocab_size
        x = tl.load(
            logits_ptr + start + columns, mask=mask, other=0.0, eviction_policy="evict_last"
        )
        x = x.to(tl.float32)
        running_max, total, moment, _, _ = _with_block(  # pyright: ignore[reportGeneralTypeIssues]
            x, mask, running_max, total, moment, softcap, logit_scale
        )
    mean_distance = moment / total

    # second walk: the gradient
    label = tl.load(labels_ptr + row)
    at_label = 0.0
    share = 0.0
    if dlse_ptr is not None:
        share = tl.load(dlse_ptr + row)
    if dlog_probs_ptr is not None:
        at_label = tl.load(dlog_probs_ptr + row)
        share = share - at_label
    for start in range(0, vocab_size, BLOCK_V):
        mask = start + columns < vocab_size
        x = tl.load(
            logits_ptr + start + columns, mask=mask, other=0.0, eviction_policy="evict_first"
        )
        x = x.to(tl.float32)
        distance = distance_from_max(x, running_max, softcap, logit_scale)
        p = tl.exp(distance) / total
        gradient = share * p
        if dentropy_ptr is not None:
            # -p (log p + entropy); 0 * -inf is nan
            deviation = tl.where(p > 0, mean_distance - distance, 0.0)
            gradient += tl.load(dentropy_ptr + row) * p * deviation
        if dlog_probs_ptr is not None:
            gradient += tl.where(start + columns == label, at_label, 0.0)
        if softcap is not None:
            gradient *= tanh_derivative(x * logit_scale / softcap)
        tl.store(logits_ptr + start + columns, gradient * logit_scale, mask=mask)


def token_statistics_rows(
    logits: Tensor,  # (C, V)
    labels: Tensor,  # (C,)
    options: LossOptions,
    entropy: Tensor,
    lse: Tensor,
    is_top1: Tensor,
    mean_logits: Tensor,
    log_sum_sq_probs: Tensor,
) -> None:
    """Write each of the last five, (C,)."""
    rows, vocab_size = logits.shape
    if not rows:
        return
    block_v, num_warps = block_and_warps(vocab_size, 64 if torch.version.hip else 32)
    with torch.cuda.device_of(logits):
        _token_statistics_kernel[(rows,)](
            logits,
            logits.stride(0),
            labels,
            entropy,
            lse,
            is_top1,
            mean_logits,
            log_sum_sq_probs,
            vocab_size,
            options.softcap,
            options.logit_scale,
            BLOCK_V=block_v,
            num_warps=num_warps,  # pyright: ignore[reportCallIssue]
        )


def log_probs_gradient_rows_(
    logits: Tensor,  # (C, V)
    labels: Tensor,  # (C,)
    options: LossOptions,
    dlog_probs: Tensor | None,  # (C,) float32
    dentropy: Tensor | None,  # (C,) float32
    dlse: Tensor | None,  # (C,) float32
) -> None:
    """Turn raw logits into the gradient by them."""
    rows, vocab_size = logits.shape
    if not rows:
        return
    block_v, num_warps = block_and_warps(vocab_size, 64 if torch.version.hip else 32)
    with torch.cuda.device_of(logits):
        _log_probs_gradient_kernel[(rows,)](
            logits,
            logits.stride(0),
            labels,
            dlog_probs,
            dentropy,
            dlse,
            vocab_size,
            options.softcap,
            options.logit_scale,
            BLOCK_V=block_v,
            num_warps=num_warps,  # pyright: ignore[reportCallIssue]
        )
