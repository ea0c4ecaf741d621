"""Statistics of each token's distribution beside its loss, and the gradient by its logits.

With p = softmax(z), z the logits of ``options``, and y the label:

    log_prob         = z_y - lse                  lse = log(sum_v exp(z_v))
    entropy          = -sum_v p_v log(p_v)
    is_top1          : y is the first of the largest logits
    mean_logits      = mean_v z_v
    log_sum_sq_probs = log(sum_v p_v ** 2)

    d/dz_v = p_v (dlse - dlog_prob - dentropy (log(p_v) + entropy)) + [v = y] dlog_prob

for upstream gradients dlog_prob, dentropy and dlse. Here in PyTorch operations, some rows at a time
as in ``pytorch``; ``triton/token_statistics`` has the kernels. C: rows, V: vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, serves_triton
from liger_patch.kernels.head.pytorch import blocks_of_rows
from liger_patch.kernels.options import LossOptions


class TokenStatistics(NamedTuple):
    """Of each token, (N,); None where not computed. All but ``is_top1`` in the dtype of losses."""

    entropy: Tensor
    lse: Tensor
    is_top1: Tensor  # bool
    mean_logits: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None

    def of(self, tokens: slice) -> "TokenStatistics":
        """Return the same of some of the tokens."""
        return TokenStatistics(*(None if each is None else each[tokens] for each in self))  # pyright: ignore[reportArgumentType]


class UpstreamGradients(NamedTuple):
    """Of each token's log_prob, entropy and lse, (N,); None for zero."""

    log_probs: Tensor | None
    entropy: Tensor | None
    lse: Tensor | None


def token_statistics_rows(
    logits: Tensor,  # (C, V)
    labels: Tensor,  # (C,) in [0, V)
    options: LossOptions,
    out: TokenStatistics,  # (C,), all of them
) -> None:
    """Write the statistics of rows of raw logits."""
    entropy, lse, is_top1, mean_logits, log_sum_sq_probs = out
    assert mean_logits is not None
    assert log_sum_sq_probs is not None
    if serves_triton(logits):
        from liger_patch.kernels.triton import token_statistics

        token_statistics.token_statistics_rows(
            logits,
            labels,
            options,
            entropy=entropy,
            lse=lse,
            is_top1=is_top1,
            mean_logits=mean_logits,
            log_sum_sq_probs=log_sum_sq_probs,
        )
        return
    for part in blocks_of_rows(logits):
        z, _ = z_and_slope(logits[part], options)
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
    labels: Tensor,  # (C,) in [0, V)
    options: LossOptions,
    upstream: UpstreamGradients,  # (C,)
) -> None:
    """Turn raw logits into the gradient by them, in place."""
    if serves_triton(logits):
        from liger_patch.kernels.triton import token_statistics

        token_statistics.log_probs_gradient_rows_(logits, labels, options, *upstream)
        return
    dlog_probs, dentropy, dlse = upstream
    for part in blocks_of_rows(logits):
        z, slope = z_and_slope(logits[part], options)
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


def z_and_slope(x: Tensor, options: LossOptions) -> tuple[Tensor, Tensor | None]:
    """Return z of raw logits in a memory of its own, and dz/dx over the logit scale, None for 1."""
    z = x.to(accumulation_dtype(x.dtype), copy=True).mul_(options.logit_scale)
    if options.softcap is None:
        return z, None
    squashed = z.div_(options.softcap).tanh_()
    return squashed * options.softcap, squashed.square_().neg_().add_(1.0)
