"""How many tokens' logits are held at once: equal chunks within a budget of bytes."""

MIB = 2**20
DEFAULT_CHUNK_MIB = (
    512  # 2048 rows of a 128k vocabulary in bf16: enough to keep the matrix products at full speed
)
ROW_MULTIPLE = 128  # the row tile of the matrix products on tensor cores


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
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]
