"""PyTorch form of the statistics of tokens. The formulas are in ``token_statistics``.

A few rows at a time, as in ``cross_entropy_pytorch``. C: rows, V: vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_patch.kernels.head.options import LossOptions
from liger_patch.kernels.head.pytorch import COPIES, SCRATCH_BYTES, accumulation_dtype


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
    for part in _blocks(logits):
        z, _ = _bent(logits[part], options)
        column = torch.arange(z.shape[1], device=z.device)
        label = labels[part, None]
        label_z = z.gather(1, label)
        mean_logits[part] = z.mean(1)
        first = z.masked_fill(column >= label, -torch.inf).amax(1) < label_z[:, 0]
        highest = z.amax(1)
        is_top1[part] = first & (label_z[:, 0] >= highest)
        distance = z.sub_(highest[:, None])
        odds = distance.exp()
        total = odds.sum(1)
        log_total = total.log()
        lse[part] = highest + log_total
        log_sum_sq_probs[part] = odds.square().sum(1).log() - 2 * log_total
        distance.clamp_(min=torch.finfo(z.dtype).min)  # 0 * -inf is nan
        entropy[part] = log_total - odds.mul_(distance).sum(1) / total


def log_probs_gradient_rows_(
    logits: Tensor,  # (C, V)
    labels: Tensor,  # (C,)
    options: LossOptions,
    dlog_probs: Tensor | None,  # (C,)
    dentropy: Tensor | None,  # (C,)
    dlse: Tensor | None,  # (C,)
) -> None:
    """Turn raw logits into the gradient by them."""
    for part in _blocks(logits):
        z, slope = _bent(logits[part], options)
        # the maximum and the logarithm of the sum, one after the other: lse would be rounded to the
        # maximum's last digit
        distance = z.sub_(z.amax(1, keepdim=True))
        gradient = distance.exp()
        total = gradient.sum(1, keepdim=True)
        gradient.div_(total)
        share = torch.zeros_like(total)
        if dlse is not None:
            share = share + dlse[part, None]
        if dlog_probs is not None:
            share = share - dlog_probs[part, None]
        if dentropy is not None:
            log_p = distance.clamp_(min=torch.finfo(z.dtype).min).sub_(total.log())
            entropy = -(gradient * log_p).sum(1, keepdim=True)
            share = share - log_p.add_(entropy).mul_(dentropy[part, None])
        gradient.mul_(share)
        if dlog_probs is not None:
            gradient.scatter_add_(1, labels[part, None], dlog_probs[part, None].to(gradient.dtype))
        gradient.mul_(options.logit_scale if slope is None else slope.mul_(options.logit_scale))
        logits[part] = gradient


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows, vocab_size = logits.shape
    itemsize = accumulation_dtype(logits.dtype).itemsize
    block = max(1, SCRATCH_BYTES // (COPIES * vocab_size * itemsize))
    for start in range(0, rows, block):
        yield slice(start, min(start + block, rows))


def _bent(x: Tensor, options: LossOptions) -> tuple[Tensor, Tensor | None]:
    """z in a memory of its own, and dz/dx over the logit scale, None for 1."""
    z = x.to(accumulation_dtype(x.dtype), copy=True).mul_(options.logit_scale)
    if options.softcap is None:
        return z, None
    squashed = z.div_(options.softcap).tanh_()
    return squashed * options.softcap, squashed.square_().neg_().add_(1.0)
