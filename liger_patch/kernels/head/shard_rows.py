"""Rows of one shard's logits: reduced to the few numbers that other shards need, and turned into
gradients.

    d_v  = z_v - highest
    dz_v = exp(d_v) (factor + entropy_factor (mean_distance - d_v)) - smooth w_v

except at the label, whose gradient is computed apart: near p = 1, p - 1 would cancel. z: the logits
of ``options``, ``highest``: the largest z of the whole vocabulary, w: class weights, 1 where there
are none. In PyTorch operations here, some rows at a time as in ``pytorch``;
``triton/vocab_shard`` has the kernels. C: rows, R: ranks, V_r: classes of the shard.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, serves_triton
from liger_patch.kernels.head.pytorch import blocks_of_rows
from liger_patch.kernels.head.statistics import z_and_slope
from liger_patch.kernels.options import LossOptions

LOWEST = -3.0e38  # stands for the largest of no logits, and finite: -inf - -inf is nan


class ShardSums(NamedTuple):
    """What a shard knows of each row, (C,); or all shards, (R, C).

    Attributes:
        highest: the largest z of the shard, at least LOWEST.
        others: the sum of exp(z - highest) without the label's.
        label_distance: z_y - highest; -inf where the label is another shard's.
        weighted: the sum of w (z - highest), with w the class weights or 1. For label smoothing.
        weight_sum: the sum of w. For label smoothing.
        moment: the sum of (z - highest) exp(z - highest).
        squares: the sum of exp(z - highest) ** 2.
        z_sum: the sum of z.
        label_z: z_y; -inf where the label is another shard's.
        before_label: the largest z of the classes before the label.
    """

    highest: Tensor
    others: Tensor
    label_distance: Tensor
    weighted: Tensor | None = None
    weight_sum: Tensor | None = None
    moment: Tensor | None = None
    squares: Tensor | None = None
    z_sum: Tensor | None = None
    label_z: Tensor | None = None
    before_label: Tensor | None = None


BASIC, OF_SMOOTHING, OF_STATISTICS = (ShardSums._fields[a:b] for a, b in ((0, 3), (3, 5), (5, 10)))


class RowGradients(NamedTuple):
    """What makes a row of logits its gradient, (C,) each; a softcap's slope comes on top."""

    highest: Tensor
    factor: Tensor
    label_gradient: Tensor
    smooth: Tensor | None = None
    entropy_factor: Tensor | None = None
    mean_distance: Tensor | None = None


def shard_sums(
    logits: Tensor,  # (C, V_r)
    labels: Tensor,  # (C,) from the first of the columns, outside them where not this shard's
    options: LossOptions,
    class_weight: Tensor | None,  # (V_r,)
    names: Sequence[str],
) -> Tensor:
    """Return (k, C) the named fields of ``ShardSums`` of raw logits."""
    rows, columns = logits.shape
    sums = logits.new_empty(len(names), rows, dtype=accumulation_dtype(logits.dtype))
    out = ShardSums(**dict(zip(names, sums.unbind(), strict=True)))
    if serves_triton(logits):
        from liger_patch.kernels.triton import vocab_shard

        vocab_shard.shard_sums(logits, labels, options, class_weight, *out)
        return sums
    if not columns:
        sums.zero_()
        out.highest.fill_(LOWEST)
        for each in (out.label_distance, out.label_z, out.before_label):
            if each is not None:
                each.fill_(-torch.inf)
        return sums
    for part in blocks_of_rows(logits):
        z, _ = z_and_slope(logits[part], options)
        is_own, index = _places(labels[part], columns)
        label_z = torch.where(is_own, z.gather(1, index), -torch.inf)[:, 0]
        highest = z.amax(1).clamp(min=LOWEST)
        out.highest[part], out.label_distance[part] = highest, label_z - highest
        if out.label_z is not None and out.before_label is not None and out.z_sum is not None:
            out.label_z[part], out.z_sum[part] = label_z, z.sum(1)
            is_after = torch.arange(columns, device=z.device) >= labels[part, None]
            out.before_label[part] = z.masked_fill(is_after, -torch.inf).amax(1)
        distance = z.sub_(highest[:, None])
        odds = distance.exp()
        if out.weighted is not None and out.weight_sum is not None:
            weight = z.new_ones(columns) if class_weight is None else class_weight.to(z.dtype)
            out.weighted[part], out.weight_sum[part] = distance @ weight, weight.sum()
        if out.moment is not None and out.squares is not None:
            distance.clamp_(min=torch.finfo(z.dtype).min)  # 0 * -inf is nan
            out.moment[part] = distance.mul_(odds).sum(1)
            out.squares[part] = odds.square().sum(1)
        odds.scatter_(1, index, odds.gather(1, index).masked_fill(is_own, 0.0))
        out.others[part] = odds.sum(1)
    return sums


def shard_gradients_(
    logits: Tensor,  # (C, V_r)
    labels: Tensor,  # (C,) as in ``shard_sums``
    options: LossOptions,
    class_weight: Tensor | None,  # (V_r,)
    gradients: RowGradients,
) -> None:
    """Turn raw logits into the gradient by them, in place."""
    columns = logits.shape[1]
    if serves_triton(logits):
        from liger_patch.kernels.triton import vocab_shard

        vocab_shard.shard_gradients_(logits, labels, options, class_weight, *gradients)
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
            deviation = (mean_distance - distance).masked_fill_(odds == 0, 0.0)
            odds.mul_(deviation.mul_(entropy_factor).add_(factor))
        else:
            odds.mul_(factor)
        if smooth is not None:
            odds.sub_(smooth if class_weight is None else smooth * class_weight.to(z.dtype))
        is_own, index = _places(labels[part], columns)
        odds.scatter_(1, index, torch.where(is_own, label_gradient, odds.gather(1, index)))
        logits[part] = odds if slope is None else odds.mul_(slope)


def _places(labels: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return (C, 1) whether a label is among the columns, and its column, or any."""
    is_own = (labels >= 0) & (labels < columns)
    return is_own[:, None], labels.clamp(0, columns - 1)[:, None]
