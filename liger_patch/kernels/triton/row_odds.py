"""Triton form of a row's softmax in one walk: (C, V) logits to losses and, in place, to odds.

The odds are those of ``odds``, against the label's logit, which a row holds: no walk has to find
the largest one first. So each logit is read once and written once, where the gradient itself, which
``cross_entropy`` writes, takes a second walk after the sum is known. What turns odds into the
gradient is a factor for each row, see ``OddsFactors``.

Where a logit is more than 44 nats above the reference, the largest of its block becomes the new
one, and what has been written of the row is scaled to it. C: rows, V: vocabulary. Extra memory:
three floats a row.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.triton.launch import launch
from liger_patch.kernels.triton.odds import LN_2, LOWEST, log_of_sum, z_and_slope

# logits that a program holds at a time, and its warps: this moved 3.3 TB/s on an H200, where a copy
# moves 4.2; blocks of 8192 with 16 warps, which wait for each other at each maximum, moved 2.2
BLOCK: dict[str, Any] = {"BLOCK_V": 4096, "num_warps": 8}
BLOCK_WITH_SOFTCAP: dict[str, Any] = {"BLOCK_V": 2048, "num_warps": 4}  # 2.9 TB/s, BLOCK 2.2
# times log2(e): the odds of 2^19 classes sum to 2^83, and 1 over that is far within bfloat16
MAX_DISTANCE = tl.constexpr(64.0)


@triton.jit
def _row_odds_kernel(
    logits_ptr,  # (C, V), to be overwritten; only read without row_scale_ptr
    logits_stride,
    labels_ptr,  # (C,) in [0, V)
    row_scale_ptr,  # (C,); None: losses only
    class_weight_ptr,  # (V,) or None
    loss_ptr,  # (C,)
    factor_ptr,  # (C,), as the next one: written with row_scale_ptr only
    label_gradient_ptr,
    vocab_size,
    softcap,  # or None
    logit_scale,
    z_loss,
    BLOCK_V: tl.constexpr,
):
    """One program per row: its loss, its odds, and what turns these into the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    columns = tl.arange(0, BLOCK_V)
    label = tl.load(labels_ptr + row)
    label_logit = tl.load(logits_ptr + label).to(tl.float32)
    label_z, label_slope = z_and_slope(label_logit, logit_scale, softcap)  # pyright: ignore
    reference = tl.maximum(label_z, LOWEST)
    sums = tl.zeros((BLOCK_V,), dtype=tl.float32)
    tl.debug_barrier()  # every warp has read the label's logit before any warp overwrites it
    for start in range(0, vocab_size, BLOCK_V):
        column = start + columns
        is_whole = start + BLOCK_V <= vocab_size
        if is_whole:
            x = tl.load(logits_ptr + column, eviction_policy="evict_first").to(tl.float32)
        else:
            x = tl.load(logits_ptr + column, mask=column < vocab_size, other=0.0).to(tl.float32)
        z, slope = z_and_slope(x, logit_scale, softcap)
        # few blocks hold the label, and only the last ends beyond the vocabulary
        if ((label >= start) & (label < start + BLOCK_V)) | (start + BLOCK_V > vocab_size):
            z = tl.where((column != label) & (column < vocab_size), z, float("-inf"))
        highest = tl.max(z, axis=0)
        if highest - reference > MAX_DISTANCE:
            factor = tl.exp2(reference - highest)
            sums *= factor
            if row_scale_ptr is not None:
                tl.debug_barrier()  # every warp has written its part of the blocks before
                for before in range(0, start, BLOCK_V):
                    odds = tl.load(logits_ptr + before + columns).to(tl.float32)
                    tl.store(logits_ptr + before + columns, odds * factor)
            reference = highest
        odds = tl.exp2(z - reference)
        sums += odds
        if row_scale_ptr is not None:
            if is_whole:
                tl.store(logits_ptr + column, odds * slope)
            else:
                tl.store(logits_ptr + column, odds * slope, mask=column < vocab_size)

    others = tl.sum(sums, axis=0)
    label_odds = tl.exp2(label_z - reference)  # 1, but where the reference is not the label
    total = label_odds + others
    log_sum = log_of_sum(label_odds, others)
    gap = log_sum + (reference - label_z) * LN_2
    lse = log_sum + reference * LN_2
    label_share = 1.0
    if class_weight_ptr is not None:
        label_share = tl.load(class_weight_ptr + label).to(tl.float32)
    rest_share = 2.0 * z_loss * lse
    tl.store(loss_ptr + row, label_share * gap + z_loss * lse * lse)
    if row_scale_ptr is not None:
        scale = tl.load(row_scale_ptr + row) * logit_scale / total
        label_gradient = (rest_share * label_odds - label_share * others) * label_slope * scale
        tl.store(factor_ptr + row, (label_share + rest_share) * scale)
        tl.store(label_gradient_ptr + row, label_gradient)


def row_odds_(
    logits: Tensor,  # (C, V)
    labels: Tensor,  # (C,)
    options: LossOptions,
    *,
    losses: Tensor,  # (C,) float32
    row_scale: Tensor | None,  # (C,) float32
    factors: Tensor,  # (C,) float32, written with row_scale, as the next one
    label_gradients: Tensor,
) -> None:
    """Write losses. With ``row_scale``, turn logits into odds too, and write what turns these into
    the gradient of the sum of ``row_scale * losses``.
    """
    rows, vocab_size = logits.shape
    if rows == 0:
        return
    class_weight = options.class_weight
    launch(
        _row_odds_kernel,
        (rows,),
        logits,
        logits.stride(0),
        labels.contiguous(),
        None if row_scale is None else row_scale.contiguous(),
        None if class_weight is None else class_weight.contiguous(),
        losses,
        factors,
        label_gradients,
        vocab_size,
        options.softcap,
        options.logit_scale,
        options.z_loss,
        **(BLOCK if options.softcap is None else BLOCK_WITH_SOFTCAP),
    )
