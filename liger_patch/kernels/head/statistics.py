"""What the sums of a row of logits say of its token: its loss, the statistics of its distribution,
and the gradient by its logits.

With p = softmax(z), z the logits of ``options``, and y the label:

    log_prob         = z_y - lse                  lse = log(sum_v exp(z_v))
    entropy          = -sum_v p_v log(p_v)
    is_top1          : y is the first of the largest logits
    mean_logits      = mean_v z_v
    log_sum_sq_probs = log(sum_v p_v ** 2)

    d/dz_v = p_v (dlse - dlog_prob - dentropy (log(p_v) + entropy)) + [v = y] dlog_prob

for upstream gradients dlog_prob, dentropy and dlse. C: rows, V: vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.head.row_sums import RowGradients, RowSums
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

    def of(self, tokens: slice) -> "UpstreamGradients":
        """Return the same of some of the tokens."""
        return UpstreamGradients(*(None if each is None else each[tokens] for each in self))


def write_statistics(sums: RowSums, vocab_size: int, out: TokenStatistics) -> None:
    """Write all the statistics of rows, (C,)."""
    assert out.mean_logits is not None
    assert out.log_sum_sq_probs is not None
    total = sums.total
    log_sum = total.log()
    out.entropy.copy_(log_sum - sums.moment / total)
    out.lse.copy_(sums.highest + log_sum)
    out.is_top1.copy_(sums.top == 0)
    out.mean_logits.copy_(sums.z_sum / vocab_size)
    out.log_sum_sq_probs.copy_(sums.squares.log() - 2 * log_sum)


def losses_and_gradients(
    sums: RowSums,
    labels: Tensor,  # (C,) in [0, V)
    options: LossOptions,
    vocab_size: int,
    row_scale: Tensor | None,  # (C,)
) -> tuple[Tensor, RowGradients | None]:
    """Return the losses, and with ``row_scale`` their gradients."""
    # the maximum stays apart from the logarithm of the sum, as in ``pytorch``
    total = sums.total
    log_sum = total.log()
    lse = sums.highest + log_sum
    label_weight = torch.ones_like(lse)
    if options.class_weight is not None:
        label_weight = options.class_weight.to(lse.dtype).index_select(0, labels)
    label_share = (1.0 - options.label_smoothing) * label_weight
    losses = label_share * (log_sum - sums.label_distance) + options.z_loss * lse * lse
    rest_share = 2.0 * options.z_loss * lse
    smooth_share = options.label_smoothing / vocab_size
    if smooth_share:
        losses = losses + smooth_share * (sums.weight_sum * log_sum - sums.weighted)
        rest_share = rest_share + smooth_share * sums.weight_sum
    if row_scale is None:
        return losses, None
    scale = row_scale * options.logit_scale
    label_part = sums.label_distance.exp()
    label_gradient = (rest_share * label_part - label_share * sums.others) / total
    return losses, RowGradients(
        sums.highest,
        (label_share + rest_share) / total * scale,
        (label_gradient - smooth_share * label_weight) * scale,
        smooth_share * scale if smooth_share else None,
    )


def gradients_of_log_probs(
    sums: RowSums,
    options: LossOptions,
    upstream: UpstreamGradients,  # (C,)
) -> RowGradients:
    """Return the gradients for upstream gradients of log-probabilities, entropy and lse."""
    dlog_probs, dentropy, dlse = (None if u is None else u * options.logit_scale for u in upstream)
    total = sums.total
    p = sums.label_distance.exp() / total
    label_gradient = share = torch.zeros_like(p)
    if dlse is not None:
        share = share + dlse
        label_gradient = label_gradient + dlse * p
    if dlog_probs is not None:
        share = share - dlog_probs
        label_gradient = label_gradient + dlog_probs * (sums.others / total)
    gradients = RowGradients(sums.highest, share / total, label_gradient)
    if dentropy is None:
        return gradients
    mean_distance = sums.moment / total
    deviation = (mean_distance - sums.label_distance).masked_fill(p == 0, 0.0)
    return gradients._replace(
        label_gradient=label_gradient + dentropy * p * deviation,
        entropy_factor=dentropy / total,
        mean_distance=mean_distance,
    )
