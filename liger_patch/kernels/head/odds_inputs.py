"""Which heads the odds kernels of Hopper serve (``hopper``), how their inputs must lie in memory,
and for how many tokens odds of any kind are worth their launches.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from liger_patch.kernels.backend import is_hopper, takes_descriptors
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.options import LossOptions

STATISTICS = frozenset({"entropy", "lse", "is_top1"})
MAX_RANK = 64  # of an adapter: larger tiles would not fit in shared memory beside the stages
# tokens of a batch: up to so many, the device would wait for the launches of the odds kernels.
# Measured with 512 tokens on an idle H200: Llama-3-8B's head takes 3.1 ms with odds and 2.9
# without, Qwen3-0.6B's 2.5 and 1.5. Odds of rows (row_odds) take as many launches more
SMALL_BATCH = 512


def serves_odds(
    operands: HeadInputs, options: LossOptions, statistics: Collection[str] = ()
) -> bool:
    """Return True if the odds kernels serve such a head.

    That is: bf16 on Hopper; a plain weight; no bias and no label smoothing; of an adapter, a rank
    up to MAX_RANK; hidden size and rank in multiples of 8; rows that the tensor memory accelerator
    takes as they lie; of the statistics, only those in STATISTICS. float16 could not hold odds.
    """
    x, weight, bias, low_rank, _ = operands
    return (
        x.dtype == torch.bfloat16
        and is_hopper(x.device)
        and takes_descriptors(x.device)
        and isinstance(weight, Tensor)
        and bias is None
        and options.label_smoothing == 0.0
        and STATISTICS.issuperset(statistics)
        and x.shape[1] % 8 == 0
        and (low_rank is None or (low_rank.shape[1] <= MAX_RANK and low_rank.shape[1] % 8 == 0))
        and all(_fits_descriptor(each) for each in operands if isinstance(each, Tensor))
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
