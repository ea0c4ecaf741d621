"""What else is known of each token's distribution, and the gradient by its logits.

With p = softmax(z), z the logits of ``loss_options``, and y the label:

    log_prob         = z_y - lse                  lse = log(sum_v exp(z_v))
    entropy          = -sum_v p_v log(p_v)
    is_top1          : y is the first of the largest logits
    mean_logits      = mean_v z_v
    log_sum_sq_probs = log(sum_v p_v ** 2)

    d/dz_v = p_v (dlse - dlog_prob - dentropy (log(p_v) + entropy)) + [v = y] dlog_prob

for upstream gradients dlog_prob, dentropy and dlse. C: rows, V: vocabulary.
"""

from typing import NamedTuple

from torch import Tensor

from liger_patch.kernels.backend import serves_triton
from liger_patch.kernels.head import statistics_pytorch as token_statistics_pytorch
from liger_patch.kernels.head.options import LossOptions


class TokenStatistics(NamedTuple):
    """Of each token, (N,); None where not computed. All but ``is_top1`` in the dtype of losses."""

    entropy: Tensor
    lse: Tensor
    is_top1: Tensor  # bool
    mean_logits: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None

    def of(self, tokens: slice) -> "TokenStatistics":
        """The same of some of the tokens."""
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
    assert out.mean_logits is not None
    assert out.log_sum_sq_probs is not None
    _form(logits).token_statistics_rows(
        logits,
        labels,
        options,
        entropy=out.entropy,
        lse=out.lse,
        is_top1=out.is_top1,
        mean_logits=out.mean_logits,
        log_sum_sq_probs=out.log_sum_sq_probs,
    )


def log_probs_gradient_rows_(
    logits: Tensor,  # (C, V)
    labels: Tensor,  # (C,) in [0, V)
    options: LossOptions,
    upstream: UpstreamGradients,  # (C,)
) -> None:
    """Turn raw logits into the gradient by them, in place."""
    _form(logits).log_probs_gradient_rows_(logits, labels, options, *upstream)


def _form(logits: Tensor):
    if serves_triton(logits):
        from liger_patch.kernels.triton import token_statistics as form
    else:
        form = token_statistics_pytorch
    return form
