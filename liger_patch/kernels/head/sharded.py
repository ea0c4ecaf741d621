"""Logits of a vocabulary that is distributed over the ranks of a group.

For each chunk, a rank reduces its own columns to a few numbers a row, the ranks gather these, and
each rank turns its columns into gradients. The gather has at most 8 C numbers (see ``shard_rows``).
Every rank adds them in the order of the ranks, so all ranks have the same bits. C: rows, R: ranks,
V: vocabulary, V_r: its part on this rank.
"""

import torch
from torch import Tensor

from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.head.labels import CompactedLabels
from liger_patch.kernels.head.logits import LogitsForm
from liger_patch.kernels.head.products import logits_
from liger_patch.kernels.head.shard_rows import (
    BASIC,
    OF_SMOOTHING,
    OF_STATISTICS,
    RowGradients,
    ShardSums,
    shard_gradients_,
    shard_sums,
)
from liger_patch.kernels.head.statistics import TokenStatistics, UpstreamGradients
from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.vocab_shard import VocabShard


class ShardedForm(LogitsForm):
    """Computes losses and gradients of chunks of tokens from the logits of one shard."""

    def __init__(
        self,
        operands: HeadInputs,
        labels: CompactedLabels,
        options: LossOptions,
        shard: VocabShard,
        *,
        has_statistics: bool = False,
        upstream: UpstreamGradients | None = None,
    ) -> None:
        super().__init__(
            operands, labels, options, has_statistics=has_statistics, upstream=upstream
        )
        self._shard, self._own_weight = shard, None
        if options.class_weight is not None:
            rows = operands.weight.shape[0]
            self._own_weight = options.class_weight[shard.start : shard.start + rows].contiguous()

    def run(
        self,
        operands: HeadInputs,
        start: int,
        *,
        memory: Tensor | None,  # (C, V_r)
        row_scale: Tensor | None,
    ) -> None:
        """Compute the losses, statistics and gradients of C tokens: see ``HeadForm``."""
        assert memory is not None
        logits = logits_(memory, operands)
        chunk = slice(start, start + len(logits))
        labels, options = self._labels[chunk], self._options
        own_labels = labels - self._shard.start  # of other shards: outside [0, V_r)
        has_smoothing = options.label_smoothing > 0
        has_moments = self.statistics is not None or self._upstream is not None
        names = BASIC + OF_SMOOTHING * has_smoothing + OF_STATISTICS * has_moments
        sums = shard_sums(logits, own_labels, options, self._own_weight, names)
        of_shards = self._shard.gather(sums).unbind(1)
        rows = _Rows(ShardSums(**dict(zip(names, of_shards, strict=True))))
        gradients = None
        if self._upstream is not None:
            upstream = UpstreamGradients(*(None if u is None else u[chunk] for u in self._upstream))
            gradients = rows.gradients_of_log_probs(options, upstream)
        else:
            if self.statistics is not None:
                rows.write_statistics(self.statistics.of(chunk), self._shard.vocab_size)
            scale = None if row_scale is None else row_scale[chunk]
            vocab_size = self._shard.vocab_size
            self.losses[chunk], gradients = rows.losses(labels, options, vocab_size, scale)
        if gradients is not None:
            shard_gradients_(logits, own_labels, options, self._own_weight, gradients)


class _Rows:
    """What is known of each row of the whole vocabulary, (C,)."""

    def __init__(self, shards: ShardSums) -> None:  # (R, C)
        self._shards = shards
        # the maximum stays apart from the logarithm of the sum, as in ``pytorch``
        self._highest = shards.highest.amax(0)
        self._lowered = shards.highest - self._highest  # (R, C)
        self._factors = self._lowered.exp()
        self._label_distance = (shards.label_distance + self._lowered).amax(0)
        self._label_part = self._label_distance.exp()
        self._others = (shards.others * self._factors).sum(0)
        self._total = self._others + self._label_part
        self._log_sum = self._total.log()
        self._mean_distance = None
        if shards.moment is not None:
            totals = shards.others + shards.label_distance.exp()
            moments = self._factors * (shards.moment + self._lowered * totals)
            self._mean_distance = moments.sum(0) / self._total

    def write_statistics(self, out: TokenStatistics, vocab_size: int) -> None:
        shards = self._shards
        label_z, before_label = shards.label_z, shards.before_label
        assert self._mean_distance is not None
        assert shards.squares is not None
        assert shards.z_sum is not None
        assert label_z is not None
        assert before_label is not None
        assert out.mean_logits is not None
        assert out.log_sum_sq_probs is not None
        out.entropy.copy_(self._log_sum - self._mean_distance)
        out.lse.copy_(self._highest + self._log_sum)
        label_z = label_z.amax(0)
        out.is_top1.copy_((label_z >= self._highest) & (label_z > before_label.amax(0)))
        out.mean_logits.copy_(shards.z_sum.sum(0) / vocab_size)
        squares = (shards.squares * self._factors.square()).sum(0)
        out.log_sum_sq_probs.copy_(squares.log() - 2 * self._log_sum)

    def losses(
        self,
        labels: Tensor,  # (C,) in [0, V)
        options: LossOptions,
        vocab_size: int,
        row_scale: Tensor | None,  # (C,)
    ) -> tuple[Tensor, RowGradients | None]:
        """Return the losses, and with ``row_scale`` their gradients."""
        lse = self._highest + self._log_sum
        label_weight = torch.ones_like(lse)
        if options.class_weight is not None:
            label_weight = options.class_weight.to(lse.dtype).index_select(0, labels)
        label_share = (1.0 - options.label_smoothing) * label_weight
        losses = label_share * (self._log_sum - self._label_distance) + options.z_loss * lse * lse
        rest_share = 2.0 * options.z_loss * lse
        smooth_share = options.label_smoothing / vocab_size
        if smooth_share:
            shards = self._shards
            assert shards.weighted is not None
            assert shards.weight_sum is not None
            weighted = (shards.weighted + shards.weight_sum * self._lowered).sum(0)
            weight_sum = shards.weight_sum.sum(0)
            losses = losses + smooth_share * (weight_sum * self._log_sum - weighted)
            rest_share = rest_share + smooth_share * weight_sum
        if row_scale is None:
            return losses, None
        scale = row_scale * options.logit_scale
        label_gradient = (rest_share * self._label_part - label_share * self._others) / self._total
        return losses, RowGradients(
            self._highest,
            (label_share + rest_share) / self._total * scale,
            (label_gradient - smooth_share * label_weight) * scale,
            smooth_share * scale if smooth_share else None,
        )

    def gradients_of_log_probs(
        self, options: LossOptions, upstream: UpstreamGradients
    ) -> RowGradients:
        dlog_probs, dentropy, dlse = (
            None if u is None else u * options.logit_scale for u in upstream
        )
        p = self._label_part / self._total
        label_gradient = share = torch.zeros_like(p)
        if dlse is not None:
            share = share + dlse
            label_gradient = label_gradient + dlse * p
        if dlog_probs is not None:
            share = share - dlog_probs
            label_gradient = label_gradient + dlog_probs * (self._others / self._total)
        entropy_factor = None
        if dentropy is not None and self._mean_distance is not None:
            entropy_factor = dentropy / self._total
            deviation = (self._mean_distance - self._label_distance).masked_fill(p == 0, 0.0)
            label_gradient = label_gradient + dentropy * p * deviation
        return RowGradients(
            self._highest,
            share / self._total,
            label_gradient,
            None,
            entropy_factor,
            self._mean_distance,
        )
