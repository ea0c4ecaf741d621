"""Attention of rows that hold several sequences, have a sliding window or padding, without their
mask.

A mask (T, T) costs PyTorch's attention its fastest kernels: it computes all T * T products, and
copies keys and values for each group of queries. ``segments_of`` finds out whether a mask says no
more than this:

    query i sees keys j with    start(i) <= j <= i    and    i - j < window

where start(i) is the first token of its sequence. ``segments_of_intervals`` finds it out of a mask
that was not made. ``attention.segment_attention`` computes just those products.

Padding is tokens whose key no query sees. On the right, where they see the tokens before them, they
count as the end of that sequence. On the left, where they see nothing, they count as a sequence of
their own. They see each other then: their result is another one than with the mask.

B: rows, T: tokens of a row, S: sequences in all rows, D: features of an attention head.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_BYTES = 256 * 2**20  # bounds the temporary tensors of reading a mask


class Prefixes(NamedTuple):
    """The prefixes of a row (1, T). The sequences of a group continue one prefix and see all of it.
    The row holds

        all prefixes, each a sequence    the sequences that continue them, by group    others

    Attributes:
        tokens: the tokens of all prefixes.
        continued: the tokens of all groups.
        cu_seqlens: (groups + 1,) int32, 0 and where each group ends, counted behind the prefixes;
            the same of prefixes.
        lengths: the tokens of the longest group, and of the longest prefix.
    """

    tokens: int
    continued: int
    cu_seqlens: tuple[Tensor, Tensor]
    lengths: tuple[int, int]


class Segments(NamedTuple):
    """The keys that each query of rows (B, T) sees.

    Attributes:
        cu_seqlens: (S + 1,) int32, 0 and where each sequence ends, counted along all rows; None
            where each row is one sequence.
        max_seqlen: the tokens of the longest sequence.
        window: how many keys a query sees at most; None for all of its sequence up to itself.
        has_padding: whether there is padding, which sees other keys here than with the mask.
        prefixes: those that sequences continue; None where no sequence does.
    """

    cu_seqlens: Tensor | None
    max_seqlen: int
    window: int | None
    has_padding: bool = False
    prefixes: Prefixes | None = None

    @property
    def is_causal(self) -> bool:
        """Return whether each query sees all keys of its row up to its own."""
        return self.cu_seqlens is None and self.window is None


def segments_of(mask: Tensor, rows: int, used: Tensor | None = None) -> Segments | None:
    """Return the segments that a mask describes, None for a mask of another kind.

    Reads the mask on its device, block by block, and a few numbers on the host. Beside numbers for
    each token, it takes about BLOCK_BYTES of memory.

    Args:
        mask: (rows or 1, T, T) bool, True where a query (its row) sees a key.
        rows: B.
        used: (B, T) bool, True for queries whose result is used; None for all. A mask with padding
            is described only if no result of the padding is used.
    """
    if mask.numel() == 0:
        return None
    if mask.stride(0) == 0:  # one for all rows
        mask = mask[:1]
    tokens = mask.shape[-1]
    positions = torch.arange(tokens, device=mask.device, dtype=torch.int32)
    # of the queries of a block at a time; a sum of bool makes a copy of 4 bytes a number
    step = max(1, BLOCK_BYTES // (8 * len(mask) * tokens))
    blocks = [slice(start, start + step) for start in range(0, tokens, step)]
    # of the keys that a query sees
    counts = torch.cat([mask[:, of].sum(-1, dtype=torch.int32) for of in blocks], 1)
    is_real = mask.diagonal(dim1=1, dim2=2)
    sees_nothing = counts == 0
    is_first = torch.where(sees_nothing, ~_before(sees_nothing), is_real & (counts == 1))
    first = torch.where(is_first, positions, 0).cummax(-1).values  # of the query's sequence
    lengths = positions - first + 1  # of its sequence, up to it
    window = counts.masked_fill(~is_real, 0).max()
    continues = _before(is_real) & (counts == torch.minimum(lengths, window))  # none behind padding
    is_described = (~is_real | is_first | continues).all() & is_first[:, 0].all()
    for of in blocks:
        distances = positions[of, None] - positions  # (queries of the block, T)
        seen = (distances >= 0) & (distances < counts[:, of, None])
        is_described &= ((seen == mask[:, of]) | ~is_real[:, of, None]).all()
    is_described &= (is_real if used is None else is_real | ~used).all()
    return _segments(rows, is_described, is_real, is_first, lengths, window)


def segments_of_intervals(
    sees: Callable[[Tensor, Tensor], Tensor],
    is_real: Tensor,  # (rows or 1, T) bool
    rows: int,
    window: int | None = None,
    used: Tensor | None = None,
    *,
    holds: Tensor | None = None,
) -> Segments | None:
    """Return the segments of a mask that was not made, None for a mask of another kind.

    For each query there must be an interval, of which it sees just the real keys. Then a few pairs
    of a query and a key say all of the mask:

    - a query sees itself;
    - it sees the first key of its segment within the window, and no real key before that;
    - the real query before a real key does not see that key.

    Takes a few numbers for each token, and no T * T operations.

    Args:
        sees: whether queries see keys, both given as places in their rows, (..., rows or 1, T)
            int64. It returns as many bools.
        is_real: whether a key is none of padding: no query sees those.
        rows: B.
        window: how many keys a query may see at most; None for no such bound.
        used: as in ``segments_of``.
        holds: () bool, whether there is such an interval for each query; None where it is known.
    """
    here = torch.arange(is_real.shape[-1], device=is_real.device).expand_as(is_real)
    to_here = torch.where(is_real, here, -1).cummax(-1).values
    before = to_here.roll(1, -1)  # the real key before each one
    before[:, 0] = -1
    has_before, before = before >= 0, before.clamp(min=0)
    seen = sees(torch.stack([here, here, before]), torch.stack([here, before, here]))
    sees_itself, sees_before, is_seen_before = seen[0], seen[1] & has_before, seen[2] & has_before
    sees_nothing = ~(is_real | sees_before)
    is_first = ~(sees_before | (sees_nothing & _before(sees_nothing)))
    first = torch.where(is_first, here, 0).cummax(-1).values
    lengths = here - first + 1
    farthest = first if window is None else torch.maximum(first, here - window + 1)
    seen = sees(torch.stack([here] * 2), torch.stack([farthest, before.gather(-1, farthest)]))
    sees_farther = seen[1] & has_before.gather(-1, farthest)
    continues = is_first | _before(is_real)  # none behind padding
    is_right = sees_itself & continues & seen[0] & ~(sees_farther | is_seen_before)
    is_described = (is_right | ~is_real).all() & (
        is_real if used is None else is_real | ~used
    ).all()
    if holds is not None:
        is_described &= holds
    return _segments(rows, is_described, is_real, is_first, lengths, window)


def _segments(
    rows: int,
    is_described: Tensor,  # () bool
    is_real: Tensor,  # (rows or 1, T) bool
    is_first: Tensor,  # (rows or 1, T) bool
    lengths: Tensor,  # (rows or 1, T), of its sequence up to a token
    window: Tensor | int | None,
) -> Segments | None:
    """Return the segments, None if a mask is not described. The host waits for their numbers."""
    tokens = is_real.shape[-1]
    most = lengths.masked_fill(~is_real, 0).max()
    numbers = [is_described, most, lengths.max(), is_first.sum(), is_real.all()]
    if isinstance(window, Tensor):
        numbers.append(window)
    described, most, max_seqlen, sequences, all_real, *read = torch.stack(numbers).tolist()
    if not described:
        return None
    window = read[0] if isinstance(window, Tensor) else window
    cu_seqlens = None
    if sequences > len(is_real):
        starts = is_first.expand(rows, tokens).flatten()
        sequences *= rows // len(is_real)
        # sorted, because the host knows their number already, and nonzero() would ask the device
        places = torch.arange(len(starts), device=starts.device).where(starts, len(starts))
        ends = [places.sort().values[:sequences], places.new_tensor([len(starts)])]
        cu_seqlens = torch.cat(ends).to(torch.int32)
    if window is not None and window >= most:  # it hides no key
        window = None
    return Segments(cu_seqlens, max_seqlen, window, not all_real)


def _before(tokens: Tensor) -> Tensor:
    """Return (B, T) bool: what holds for the token before each one, False for the first."""
    before = tokens.roll(1, -1)
    before[:, 0] = False
    return before
