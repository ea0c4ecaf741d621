"""Slices of the tokens of a gated feed-forward layer: when, and how many tokens each takes.

For long rows under gradient checkpointing, which computes one decoder layer at a time again: what
its feed-forward layer then keeps is most of the memory.
"""

import math

from torch import Tensor

from liger_patch.kernels.chunk_sizes import chunk_rows, chunks_of

# What a whole feed-forward layer may take before it is sliced: 15k tokens with I = 14336. Less than
# that is not what fills a GPU beside the checkpoints.
LONG_BYTES = 2 * 2**30
SLICE_BYTES = 512 * 2**20  # of one slice: 3744 tokens with I = 14336, which fill a GPU
GATED_TENSORS = 5  # of the intermediate size in a backward pass: gate, up, their gradients, da


def slices_of(x: Tensor, slice_tokens: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each slice of x (..., H)."""
    return chunks_of(slice_tokens, math.prod(x.shape[:-1]))


def slice_tokens(tokens: int, size: int, itemsize: int) -> int | None:
    """Return how many tokens a slice of a gated feed-forward layer takes; None for all at once.

    Args:
        tokens: N.
        size: the intermediate size.
        itemsize: bytes of a number.
    """
    if tokens <= longest_at_once(size, itemsize):
        return None
    return chunk_rows(tokens, GATED_TENSORS * size * itemsize, SLICE_BYTES)


def longest_at_once(size: int, itemsize: int) -> int:
    """Return the most tokens that such a layer takes at once."""
    return LONG_BYTES // (GATED_TENSORS * max(1, size) * itemsize)


def check_slice_tokens(slice_tokens: int | None) -> None:
    """Raise ValueError unless it is a number of tokens or None."""
    is_number = isinstance(slice_tokens, int) and not isinstance(slice_tokens, bool)
    if slice_tokens is not None and not (is_number and slice_tokens > 0):
        raise ValueError(f"slice_tokens must be a number > 0 or None, got {slice_tokens!r}")
