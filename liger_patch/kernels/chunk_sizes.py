"""How many tokens a chunk has, so that its logits fit into a budget of memory."""

ROW_MULTIPLE = 128  # the row tile of the matrix products on tensor cores
NARROW_CHUNKS = 16  # with more, a sum rounded to 16 bits after each chunk exceeds eager's error


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


def summed_chunk_bounds(
    tokens: int, row_bytes: int, budget_bytes: int, wide_bytes: int
) -> tuple[list[tuple[int, int]], bool]:
    """Return (start, stop) of each chunk of ``summed_chunk_rows``, and whether to widen the sum."""
    rows, widens = summed_chunk_rows(tokens, row_bytes, budget_bytes, wide_bytes)
    return chunks_of(rows, tokens), widens
