"""Which heads are computed from odds (``hopper``), and in which memory their inputs lie.

All ranks of a distributed vocabulary have to choose the same form, because the forms make other
collectives. So what may differ from rank to rank, where a tensor lies, decides nothing there: what
does not fit is copied.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.descriptors import is_hopper, takes_descriptors
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.options import LossOptions

STATISTICS = frozenset({"entropy", "lse", "is_top1"})
MAX_RANK = 64  # of an adapter: tiles of more would not fit beside the stages in shared memory
# tokens of a batch for which the device would wait for this form's launches. Measured on an H200
# with nothing else to do, 512 tokens: of Llama-3-8B's head 3.2 ms with it and 3.0 without, of
# Qwen3-0.6B's 2.0 and 1.4
SMALL_BATCH = 512


def serves_odds(
    operands: HeadInputs, options: LossOptions, statistics: Collection[str] = ()
) -> bool:
    """Return True if this form serves such inputs, in rows that the tensor memory accelerator takes
    as they lie; see ``suits_odds``.
    """
    return suits_odds(operands, options, statistics) and all(
        _fits_descriptor(each) for each in operands if isinstance(each, Tensor)
    )


def suits_odds(
    operands: HeadInputs, options: LossOptions, statistics: Collection[str] = ()
) -> bool:
    """Return True if odds serve such a head: bf16 on Hopper, a plain weight, without bias and label
    smoothing, an adapter's rank of up to MAX_RANK, columns in multiples of 8; of the statistics,
    those in STATISTICS. The answer is the same for every shard of a vocabulary.

    float16 could not hold odds, and other GPUs have the products and the rows' kernel.
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
    )


def is_worth_odds(tokens: int) -> bool:
    """Return False for a small batch, which other kernels compute with fewer launches. Shards of a
    vocabulary are not asked: their other form was not measured.
    """
    return tokens > SMALL_BATCH


def fitting(operands: HeadInputs) -> HeadInputs:
    """Return the same operands, copied where the tensor memory accelerator does not take them."""
    fitted: list[Any] = [
        each.clone(memory_format=torch.contiguous_format)
        if isinstance(each, Tensor) and not _fits_descriptor(each)
        else each
        for each in operands
    ]
    return HeadInputs(*fitted)


def _fits_descriptor(matrix: Tensor) -> bool:
    return (
        matrix.stride(1) == 1
        and matrix.stride(0) >= matrix.shape[1]
        and matrix.stride(0) % 8 == 0
        and matrix.data_ptr() % 16 == 0
    )
