"""Odds of a vocabulary that is distributed over the ranks of a group, on Hopper.

Each rank writes the odds of its own classes, and the ranks gather a few numbers of every row. No
logits are written.

Once a call, the labels' logits are summed over the ranks: for each label, all ranks but one give 0.
For each chunk, every rank gathers at most 6 C numbers of each rank, and adds them in the order of
the ranks. So all ranks have the same bits, and find the same overflow. Only the device knows of an
overflow. Asking it would make the host wait, which costs more than a second gather: so every chunk
gathers twice, whether it is computed again or not. C: rows.
"""

from torch import Tensor

from liger_patch.kernels.head.hopper import TILE_V, OddsForm
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.head.labels import CompactedLabels
from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.triton.shard_odds import halves
from liger_patch.kernels.vocab_shard import VocabShard


class ShardedOddsForm(OddsForm):
    """Computes losses and gradients of chunks of tokens from the odds of one shard."""

    _finished_tile_v = None  # a tile until each row's label and one after it, of every shard

    def __init__(
        self,
        operands: HeadInputs,
        labels: CompactedLabels,
        options: LossOptions,
        shard: VocabShard,
        *,
        has_statistics: bool = False,
    ) -> None:
        super().__init__(
            operands,
            labels,
            options,
            has_statistics=has_statistics,
            own_labels=labels.labels - shard.start,  # of other shards: outside [0, V_r)
        )
        self._shard, self._vocab_size = shard, shard.vocab_size
        if len(labels.labels):
            shard.start_sum_(self._label_numbers).wait()

    def _numbers(
        self, partial: Tensor, own_labels: Tensor, start: int, only_on_overflow: int
    ) -> Tensor:
        own = halves(
            partial,
            own_labels,
            self._overflow,
            self._labels.counts,
            start=start,
            only_on_overflow=only_on_overflow,
            tile_v=TILE_V,
        )
        return self._shard.gather(own).flatten(0, 1)
