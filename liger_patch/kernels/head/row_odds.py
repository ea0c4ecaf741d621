"""Odds from materialized logits, in one walk (``triton/row_odds``): for large batches in bfloat16
where Hopper's kernels do not serve.

C: tokens of a chunk, N: of the batch, V: vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.head.forms import OddsFactors
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.head.labels import CompactedLabels
from liger_patch.kernels.head.logits import LogitsForm
from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.products import writes_float32


def serves_row_odds(operands: HeadInputs, options: LossOptions) -> bool:
    """Return True if odds serve such a head.

    That is: bf16, which holds their range (float16 does not); a device that writes float32 products
    of it, which are scaled before they are rounded; a plain weight, whose row of the label is read;
    no bias and no label smoothing; matrices whose rows are contiguous.
    """
    return (
        operands.hidden_states.dtype == torch.bfloat16
        and writes_float32(operands.hidden_states)
        and isinstance(operands.weight, Tensor)
        and operands.bias is None
        and options.label_smoothing == 0.0
        and has_whole_rows(operands)
    )


def has_whole_rows(operands: HeadInputs) -> bool:
    """Return True if the elements of each row lie side by side, as the kernels read them."""
    matrices = operands.hidden_states, operands.weight, operands.low_rank, operands.low_rank_weight
    return all(each.stride(1) == 1 for each in matrices if isinstance(each, Tensor))


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
