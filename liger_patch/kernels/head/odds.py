"""Odds, the unnormalized softmax of rows of logits: which heads and batches they serve, and the
form of those that a kernel writes in one walk over materialized logits (``triton/row_odds``). Those
of Hopper, whose kernels write no logits, are in ``hopper``.

C: tokens of a chunk, N: of the batch, V: vocabulary.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import is_hopper, takes_descriptors
from liger_patch.kernels.head.gradients import OddsFactors
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.head.labels import CompactedLabels
from liger_patch.kernels.head.logits import LogitsForm
from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.products import writes_float32

STATISTICS = frozenset({"entropy", "lse", "is_top1"})
MAX_RANK = 64  # of an adapter: larger tiles would not fit in shared memory beside the stages
# tokens of a batch: up to so many, the device would wait for the launches of the odds kernels.
# Measured with 512 tokens on an idle H200: Llama-3-8B's head takes 3.1 ms with odds and 2.9
# without, Qwen3-0.6B's 2.5 and 1.5. Odds of rows take as many launches more
SMALL_BATCH = 512


def serves_odds(operands: HeadInputs, options: LossOptions, statistics: Collection[str]) -> bool:
    """Return True if Hopper's odds kernels serve such a head.

    That is: bf16 on Hopper; no bias and no label smoothing; of an adapter, a rank up to MAX_RANK;
    hidden size and rank in multiples of 8; rows that the tensor memory accelerator takes as they
    lie; of the statistics, only those in STATISTICS. float16 could not hold odds.
    """
    x, _, bias, low_rank, _ = operands
    return (
        x.dtype == torch.bfloat16
        and is_hopper(x.device)
        and takes_descriptors(x.device)
        and bias is None
        and options.label_smoothing == 0.0
        and STATISTICS.issuperset(statistics)
        and x.shape[1] % 8 == 0
        and (low_rank is None or (low_rank.shape[1] <= MAX_RANK and low_rank.shape[1] % 8 == 0))
        and all(_fits_descriptor(each) for each in operands if each is not None)
    )


def is_worth_odds(tokens: int) -> bool:
    """Return False for a small batch, which the other kernels compute with fewer launches."""
    return tokens > SMALL_BATCH


def _fits_descriptor(matrix: Tensor) -> bool:
    return (
        matrix.stride(1) == 1
        and matrix.stride(0) >= matrix.shape[1]
        and matrix.stride(0) % 8 == 0
        and matrix.data_ptr() % 16 == 0
    )


def serves_row_odds(operands: HeadInputs, options: LossOptions) -> bool:
    """Return True if odds of rows serve such a head.

    That is: bf16, which holds their range (float16 does not); a device that writes float32 products
    of it, which are scaled before they are rounded; no bias and no label smoothing; matrices whose
    rows are contiguous.
    """
    return (
        operands.hidden_states.dtype == torch.bfloat16
        and writes_float32(operands.hidden_states)
        and operands.bias is None
        and options.label_smoothing == 0.0
        and has_whole_rows(operands)
    )


def has_whole_rows(operands: HeadInputs) -> bool:
    """Return True if the elements of each row lie side by side, as the kernels read them."""
    matrices = operands.hidden_states, operands.weight, operands.low_rank, operands.low_rank_weight
    return all(each.stride(1) == 1 for each in matrices if each is not None)


class RowOddsForm(LogitsForm):
    """Computes losses of chunks of tokens from odds, and gradients from the same odds."""

    def __init__(
        self, operands: HeadInputs, labels: CompactedLabels, options: LossOptions, **how: Any
    ) -> None:
        super().__init__(operands, labels, options, **how)
        factors, label_gradients = self.losses.new_empty(2, len(labels.labels))
        self.odds = OddsFactors(factors, labels.labels, label_gradients)

    def _turn(self, logits: Tensor, chunk: slice, row_scale: Tensor | None) -> None:
        from liger_patch.kernels.triton.row_odds import row_odds_

        assert self.odds is not None
        factors, labels, label_gradients = self.odds.of(chunk)
        row_odds_(
            logits,
            labels,
            self._options,
            losses=self.losses[chunk],
            row_scale=row_scale,
            factors=factors,
            label_gradients=label_gradients,
        )
