"""Rows of logits in two walks: reduced to a few numbers, and turned into gradients by them.

    d_v  = z_v - highest
    dz_v = exp(d_v) (factor + entropy_factor (mean_distance - d_v)) - smooth w_v

except at the label, whose gradient is computed apart: near p = 1, p - 1 would cancel. z: the logits
of ``options``, ``highest``: the largest z of the row, w: class weights, 1 where there are none.

Of a vocabulary on several ranks, each reduces its own columns, gathers the numbers of all, and adds
them in the order of the ranks, so that all have the same bits. PyTorch's operations here take a few
rows at a time: their float32 copies stay within SCRATCH_BYTES, whatever the number of rows.
``triton/row_sums`` has the kernels. C: rows, R: ranks, V_r: classes of a rank, all V of them where
there is one.

The sums of a row say what is asked of its token: its loss, the statistics of its distribution, and
the factors of its gradient. With p = softmax(z) and y the label:

    log_prob         = z_y - lse                  lse = log(sum_v exp(z_v))
    entropy          = -sum_v p_v log(p_v)
    is_top1          : y is the first of the largest logits
    mean_logits      = mean_v z_v
    log_sum_sq_probs = log(sum_v p_v ** 2)

    d/dz_v = p_v (dlse - dlog_prob - dentropy (log(p_v) + entropy)) + [v = y] dlog_prob

for upstream gradients dlog_prob, dentropy and dlse.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, serves_triton
from liger_patch.kernels.options import LossOptions

SCRATCH_BYTES = 32 * 2**20  # for the copies: long vector loops, small beside a chunk of logits
COPIES = 4  # of a block of rows that live at once: x, slope, odds, deviation
LOWEST = -3.0e38  # stands for the largest of no logits, and finite: -inf - -inf is nan


def blocks_of_rows(logits: Tensor, copies: int = COPIES) -> Iterator[slice]:
    """Yield slices of the C rows, each with its copies within SCRATCH_BYTES."""
    rows, vocab_size = logits.shape
    itemsize = accumulation_dtype(logits.dtype).itemsize
    block = max(1, SCRATCH_BYTES // (copies * vocab_size * itemsize))
    for start in range(0, rows, block):
        yield slice(start, min(start + block, rows))


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


class RowSums(NamedTuple):
    """What is known of each row, (C,); of its parts on all ranks, (R, C).

    Attributes:
        highest: the largest z, at least LOWEST.
        others: the sum of exp(z - highest) without the label's.
        label_distance: z_y - highest; -inf where the label is another rank's.
        weighted: the sum of w (z - highest), with w the class weights or 1. For label smoothing.
        weight_sum: the sum of w. For label smoothing.
        moment: the sum of (z - highest) exp(z - highest). For statistics and gradients
            of entropy.
        squares: the sum of exp(z - highest) ** 2. For statistics, as all that follow.
        z_sum: the sum of z.
        top: the first class with the largest z, minus the label. float32 rounds none to 0.
    """

    highest: Tensor
    others: Tensor
    label_distance: Tensor
    weighted: Any = None  # Tensor | None, as all that follow
    weight_sum: Any = None
    moment: Any = None
    squares: Any = None
    z_sum: Any = None
    top: Any = None

    @property
    def total(self) -> Tensor:
        """The sum of exp(z - highest)."""
        return self.others + self.label_distance.exp()

    @classmethod
    def of_parts(cls, parts: "RowSums") -> "RowSums":  # (R, C)
        """Return the numbers of whole rows, (C,)."""
        highest = parts.highest.amax(0)
        lowered = parts.highest - highest
        factors = lowered.exp()
        sums = cls(
            highest,
            (parts.others * factors).sum(0),
            (parts.label_distance + lowered).amax(0),
        )
        if parts.weighted is not None:
            weighted = (parts.weighted + parts.weight_sum * lowered).sum(0)
            sums = sums._replace(weighted=weighted, weight_sum=parts.weight_sum.sum(0))
        if parts.moment is not None:
            moment = (factors * (parts.moment + lowered * parts.total)).sum(0)
            sums = sums._replace(moment=moment)
        if parts.squares is not None:
            sums = sums._replace(
                squares=(parts.squares * factors.square()).sum(0),
                z_sum=parts.z_sum.sum(0),
                top=parts.top.masked_fill(lowered != 0, torch.inf).amin(0),
            )
        return sums


BASIC, OF_SMOOTHING, OF_ENTROPY, OF_STATISTICS = (
    RowSums._fields[a:b] for a, b in ((0, 3), (3, 5), (5, 6), (5, 9))
)


class RowGradients(NamedTuple):
    """What makes a row of logits its gradient, (C,) each; a softcap's slope comes on top."""

    highest: Tensor
    factor: Tensor
    label_gradient: Tensor
    smooth: Tensor | None = None
    entropy_factor: Tensor | None = None
    mean_distance: Tensor | None = None


def row_sums(
    logits: Tensor,  # (C, V_r)
    labels: Tensor,  # (C,) from the first of the columns, outside them where another rank's
    options: LossOptions,
    class_weight: Tensor | None,  # (V_r,)
    names: Sequence[str],
) -> Tensor:
    """Return (k, C) the named fields of ``RowSums`` of raw logits."""
    rows, columns = logits.shape
    sums = logits.new_empty(len(names), rows, dtype=accumulation_dtype(logits.dtype))
    out = RowSums(**dict(zip(names, sums.unbind(), strict=True)))
    if serves_triton(logits):
        from liger_patch.kernels.triton import row_sums as kernels

        kernels.row_sums(logits, labels, options, class_weight, *out)
        return sums
    if not columns:
        sums.zero_()
        out.highest.fill_(LOWEST)
        out.label_distance.fill_(-torch.inf)
        return sums
    for part in blocks_of_rows(logits):
        z, _ = z_and_slope(logits[part], options)
        is_own, index = _places(labels[part], columns)
        highest = z.amax(1).clamp(min=LOWEST)
        out.highest[part] = highest
        label_z = torch.where(is_own, z.gather(1, index), -torch.inf)[:, 0]
        out.label_distance[part] = label_z - highest
        if out.squares is not None:
            out.z_sum[part], out.top[part] = z.sum(1), z.argmax(1) - labels[part]
        distance = z.sub_(highest[:, None])
        odds = distance.exp()
        if out.weighted is not None:
            weight = z.new_ones(columns) if class_weight is None else class_weight.to(z.dtype)
            out.weighted[part], out.weight_sum[part] = distance @ weight, weight.sum()
        if out.moment is not None:
            distance.clamp_(min=torch.finfo(z.dtype).min)  # 0 * -inf is nan
            out.moment[part] = distance.mul_(odds).sum(1)
        if out.squares is not None:
            out.squares[part] = odds.square().sum(1)
        odds.scatter_(1, index, odds.gather(1, index).masked_fill(is_own, 0.0))
        out.others[part] = odds.sum(1)
    return sums


def row_gradients_(
    logits: Tensor,  # (C, V_r)
    labels: Tensor,  # (C,) as in ``row_sums``
    options: LossOptions,
    class_weight: Tensor | None,  # (V_r,)
    gradients: RowGradients,
) -> None:
    """Turn raw logits into the gradient by them, in place."""
    columns = logits.shape[1]
    if serves_triton(logits):
        from liger_patch.kernels.triton import row_sums as kernels

        kernels.row_gradients_(logits, labels, options, class_weight, *gradients)
        return
    if not columns:
        return
    for part in blocks_of_rows(logits):
        highest, factor, label_gradient, smooth, entropy_factor, mean_distance = (
            None if each is None else each[part, None] for each in gradients
        )
        assert highest is not None
        assert factor is not None
        assert label_gradient is not None
        z, slope = z_and_slope(logits[part], options)
        distance = z.sub_(highest)
        odds = distance.exp()
        if entropy_factor is not None and mean_distance is not None:
            distance.clamp_(min=-1000.0)  # where odds are 0 in float64 too, and 0 * -inf is nan
            deviation = mean_distance - distance
            odds.mul_(deviation.mul_(entropy_factor).add_(factor))
        else:
            odds.mul_(factor)
        if smooth is not None:
            odds.sub_(smooth if class_weight is None else smooth * class_weight.to(z.dtype))
        is_own, index = _places(labels[part], columns)
        odds.scatter_(1, index, torch.where(is_own, label_gradient, odds.gather(1, index)))
        logits[part] = odds if slope is None else odds.mul_(slope)


def z_and_slope(x: Tensor, options: LossOptions) -> tuple[Tensor, Tensor | None]:
    """Return z of raw logits in new memory, and dz/dx over the logit scale; None where it is 1."""
    z = x.to(accumulation_dtype(x.dtype), copy=True).mul_(options.logit_scale)
    if options.softcap is None:
        return z, None
    squashed = z.div_(options.softcap).tanh_()
    return squashed * options.softcap, squashed.square_().neg_().add_(1.0)


def _places(labels: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return (C, 1) whether a label is among the columns, and its column, or any."""
    is_own = (labels >= 0) & (labels < columns)
    return is_own[:, None], labels.clamp(0, columns - 1)[:, None]


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
    """Return the losses, and with ``row_scale`` the factors of their gradients."""
    # the maximum stays apart from the logarithm of the sum, which would be rounded to the maximum's
    # last digit
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
    """Return the factors of the gradients, for upstream ones of log-prob, entropy and lse."""
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
