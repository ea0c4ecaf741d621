"""How many tokens' logits are held at once: equal chunks within a budget of bytes."""

MIB = 2**20
# Where the time over memory bends, measured on an H200: of a head that trains, each chunk's dweight
# is read and written again, which at 512 MiB costs up to 8 % over 1 GiB; of a frozen one nothing is
TRAINED_CHUNK_MIB = 512
FROZEN_CHUNK_MIB = 256
NARROW_CHUNKS = 16  # up to so many, rounding a sum to 16 bits after each stays in eager's error
ROW_MULTIPLE = 128  # the row tile of the matrix products on tensor cores


def default_chunk_mib(trains_weight: bool) -> int:
    """MiB of logits held at once, where nobody says."""
    return TRAINED_CHUNK_MIB if trains_weight else FROZEN_CHUNK_MIB


def chunk_bounds(tokens: int, row_bytes: int, budget_bytes: int) -> list[tuple[int, int]]:
    """(start, stop) of each chunk of ``tokens`` rows of ``row_bytes`` within ``budget_bytes``.

    As few chunks as fit, of equal size, at least a row each; sizes are multiples of ROW_MULTIPLE
    where the budget holds that many rows.
    """
    most = max(1, budget_bytes // row_bytes)
    if most >= tokens:
        return [(0, tokens)] if tokens else []
    multiple = ROW_MULTIPLE if most >= ROW_MULTIPLE else 1
    most -= most % multiple
    count = -(-tokens // most)
    size = -(-tokens // count)
    size = -(-size // multiple) * multiple
    return chunks_of(size, tokens)


def chunks_of(size: int, tokens: int) -> list[tuple[int, int]]:
    """(start, stop) of each chunk of ``size`` rows, the last with what is left."""
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def rows_before_count(tokens: int, row_bytes: int, budget_bytes: int) -> int:
    """Rows of a first chunk that runs before the host knows how many of the tokens count; 0 for
    none.

    None where the chunks are many: then the wait is nothing, and with fewer tokens
    ``summed_chunk_bounds`` may need smaller ones.
    """
    bounds = chunk_bounds(tokens, row_bytes, budget_bytes)
    return bounds[0][1] if 0 < len(bounds) <= NARROW_CHUNKS else 0


def summed_chunk_bounds(
    tokens: int, row_bytes: int, budget_bytes: int, wide_bytes: int
) -> tuple[list[tuple[int, int]], bool]:
    """``chunk_bounds`` for a sum over the chunks that is kept in 16 bits, and whether to widen it.

    Beyond NARROW_CHUNKS chunks, rounding the sum after each would cost accuracy. Then either the
    chunks are larger than the budget, or the sum is kept in ``wide_bytes`` more: whichever needs
    less memory.
    """
    bounds = chunk_bounds(tokens, row_bytes, budget_bytes)
    if len(bounds) <= NARROW_CHUNKS:
        return bounds, False
    rows = -(-tokens // NARROW_CHUNKS)
    if rows > ROW_MULTIPLE:
        rows = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
    if rows * row_bytes - budget_bytes > wide_bytes:
        return bounds, True
    return chunk_bounds(tokens, row_bytes, rows * row_bytes), False
