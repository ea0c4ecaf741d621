"""PyTorch form of the cross entropy of rows, for devices without Triton and for float64.

The formula is in ``options``. Rows are taken a few at a time, so that the float32 copies of them
stay within SCRATCH_BYTES whatever the number of rows. C: rows, V: vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype
from liger_patch.kernels.options import LossOptions

SCRATCH_BYTES = 32 * 2**20  # for the copies: long vector loops, small beside a chunk of logits
COPIES = 4  # of a block of rows that live at once: x, tanh, z or exp(z - max), z - max


def blocks_of_rows(logits: Tensor, copies: int = COPIES) -> Iterator[slice]:
    """Yield as many of the C rows at a time as SCRATCH_BYTES hold the copies of."""
    rows, vocab_size = logits.shape
    itemsize = accumulation_dtype(logits.dtype).itemsize
    block = max(1, SCRATCH_BYTES // (copies * vocab_size * itemsize))
    for start in range(0, rows, block):
        yield slice(start, min(start + block, rows))


def cross_entropy_rows(
    logits: Tensor,  # (C, V)
    labels: Tensor,  # (C,)
    options: LossOptions,
    *,
    losses: Tensor | None = None,  # (C,)
    dlogits: Tensor | None = None,  # (C, V)
    row_scale: Tensor | None = None,  # (C,)
) -> Tensor:
    """Return losses (C,) in ``accumulation_dtype``; write gradients times ``row_scale`` to
    ``dlogits``.
    """
    dtype = accumulation_dtype(logits.dtype)
    if losses is None:
        losses = torch.empty(len(logits), dtype=dtype, device=logits.device)
    for part in blocks_of_rows(logits):
        losses[part] = _block(
            logits[part].to(dtype),
            labels[part],
            options,
            None if dlogits is None else dlogits[part],
            None if row_scale is None else row_scale[part].to(dtype),
        )
    return losses


def _block(
    x: Tensor,
    labels: Tensor,
    options: LossOptions,
    dlogits: Tensor | None,
    row_scale: Tensor | None,
) -> Tensor:
    vocab_size = x.shape[1]
    supervised = labels != options.ignore_index
    labels = torch.where(supervised, labels, 0)[:, None]
    class_weight = None if options.class_weight is None else options.class_weight.to(x.dtype)

    z = x if options.logit_scale == 1.0 else x * options.logit_scale
    squashed = None
    if options.softcap is not None:
        squashed = (z / options.softcap).tanh_()
        z = squashed * options.softcap
    # the maximum stays apart from the logarithm of the sum, which would be rounded to the
    # maximum's last digit
    highest = z.amax(dim=1)
    shifted = z - highest[:, None]
    del z
    gradient = shifted.exp()
    label_part = gradient.gather(1, labels)
    others = gradient.scatter_(1, labels, 0.0).sum(dim=1)  # apart: near p = 1, p - 1 would cancel
    total = others + label_part[:, 0]
    log_sum = total.log()
    lse = highest + log_sum
    label_share = torch.full_like(lse, 1.0 - options.label_smoothing)
    if class_weight is not None:
        label_share = label_share * class_weight[labels[:, 0]]
    rest_share = 2.0 * options.z_loss * lse
    label_gap = log_sum - shifted.gather(1, labels)[:, 0]
    losses = label_share * label_gap + options.z_loss * lse * lse
    smooth_share = options.label_smoothing / vocab_size
    if smooth_share:
        weight_sum = vocab_size if class_weight is None else class_weight.sum()
        weighted_logits = shifted.sum(1) if class_weight is None else shifted @ class_weight
        losses = losses + smooth_share * (weight_sum * log_sum - weighted_logits)
        rest_share = rest_share + smooth_share * weight_sum
    del shifted

    if dlogits is not None and row_scale is not None:
        label_gradient = (rest_share * label_part[:, 0] - label_share * others) / total
        gradient.mul_(((label_share + rest_share) / total)[:, None])
        gradient.scatter_(1, labels, label_gradient[:, None])
        if smooth_share:
            gradient.sub_(smooth_share if class_weight is None else smooth_share * class_weight)
        if squashed is not None:
            gradient.mul_(squashed.square_().neg_().add_(1.0))
        gradient.mul_((row_scale * options.logit_scale)[:, None])
        dlogits.copy_(gradient.masked_fill_(~supervised[:, None], 0.0))
    return losses.masked_fill(~supervised, 0.0)
