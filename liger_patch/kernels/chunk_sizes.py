"""How many tokens are computed at once, so that what they take fits into a budget of memory: chunks
of a head's logits, and slices of a gated feed-forward layer.

Slices are for long rows under gradient checkpointing, which computes one decoder layer at a time
again: what its feed-forward layer then keeps is most of the memory.
"""

import math

from torch import Tensor

ROW_MULTIPLE = 128  # the row tile of the matrix products on tensor cores
NARROW_CHUNKS = 16  # with more, a sum rounded to 16 bits after each chunk exceeds eager's error
# What a whole feed-forward layer may take before it is sliced: 15k tokens with I = 14336. Up to
# that, other memory fills a GPU.
LONG_BYTES = 2 * 2**30
SLICE_BYTES = 512 * 2**20  # of one slice: 3712 tokens with I = 14336, which fill a GPU
GATED_TENSORS = 5  # of the intermediate size in a backward pass: gate, up, their gradients, da


def chunk_rows(tokens: int, row_bytes: int, budget_bytes: int) -> int:
    """Return the rows of each chunk of ``tokens`` rows of ``row_bytes`` within a budget; the last
    chunk has what is left.

    As few chunks as fit, of equal size, at least a row each; sizes are multiples of ROW_MULTIPLE
    where the budget holds that many rows.
    """
    most = max(1, budget_bytes // row_bytes)
    if most >= tokens:
        return tokens
    multiple = ROW_MULTIPLE if most >= ROW_MULTIPLE else 1
    most -= most % multiple
    count = -(-tokens // most)
    size = -(-tokens // count)
    return -(-size // multiple) * multiple


def chunk_bounds(tokens: int, row_bytes: int, budget_bytes: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each chunk of ``chunk_rows``."""
    return chunks_of(chunk_rows(tokens, row_bytes, budget_bytes), tokens)


def chunks_of(size: int, tokens: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each chunk of ``size`` rows, the last with what is left."""
    return [(start, min(start + size, tokens)) for start in range(0, tokens, max(1, size))]


def rows_before_count(tokens: int, row_bytes: int, budget_bytes: int) -> int:
    """Return the rows of a first chunk that runs before the count of supervised tokens is read; 0
    where no chunk runs before that.

    That is so with many chunks: there the wait for the count is short, and the size of the chunks
    depends on the count (``summed_chunk_rows``).
    """
    rows = chunk_rows(tokens, row_bytes, budget_bytes)
    return rows if tokens <= rows * NARROW_CHUNKS else 0


def summed_chunk_rows(
    tokens: int, row_bytes: int, budget_bytes: int, wide_bytes: int
) -> tuple[int, bool]:
    """Return ``chunk_rows`` for a sum over the chunks that is kept in 16 bits, and whether to widen
    it.

    Beyond NARROW_CHUNKS chunks, rounding the sum after each would cost accuracy. Then either the
    chunks are larger than the budget, or the sum is kept in ``wide_bytes`` more: whichever needs
    less memory.
    """
    within_budget = chunk_rows(tokens, row_bytes, budget_bytes)
    if tokens <= within_budget * NARROW_CHUNKS:
        return within_budget, False
    rows = -(-tokens // NARROW_CHUNKS)
    if rows > ROW_MULTIPLE:
        rows = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    if rows * row_bytes - budget_bytes > wide_bytes:
        return within_budget, True
    return chunk_rows(tokens, row_bytes, rows * row_bytes), False


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


def size_of_experts(hidden_size: int, size: int, slots: int) -> int:
    """Return the intermediate size of a feed-forward layer that takes as much for a token as these
    experts do: in a backward pass, gate, up, their gradients, dh and an upstream row of each slot.

    Args:
        size: the intermediate size of an expert.
        slots: the experts of a token.
    """
    return slots * (size + hidden_size // GATED_TENSORS)
