"""Attention of rows that hold several sequences, have a sliding window or padding, without their
mask.

A mask (T, T) costs PyTorch's attention its fastest kernels: it computes all T * T products, and
copies keys and values for each group of queries. ``segments_of`` finds out whether a mask says no
more than this:

    query i sees keys j with    start(i) <= j <= i    and    i - j < window

where start(i) is the first token of its sequence. ``segment_attention`` computes just those
products, with the flash attention of PyTorch.

Padding is tokens whose key no query sees. On the right, where they see the tokens before them, they
count as the end of that sequence. On the left, where they see nothing, they count as a sequence of
their own. They see each other then: their result is another one than with the mask.

B: rows, T: tokens of a row, S: sequences in all rows, D: features of an attention head. Flash
attention: Dao, "FlashAttention-2" (arXiv:2307.08691).
"""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_BYTES = 64 * 2**20  # of a mask that is read at a time: bounds the temporary tensors


class Segments(NamedTuple):
    """The keys that each query of rows (B, T) sees.

    Attributes:
        ends: (S + 1,) int32, 0 and where each sequence ends, counted along all rows; None where
            each row is one sequence.
        longest: the tokens of the longest sequence.
        window: how many keys a query sees at most; None for all of its sequence up to itself.
    """

    ends: Tensor | None
    longest: int
    window: int | None

    @property
    def is_causal(self) -> bool:
        """Return whether each query sees all keys of its row up to its own."""
        return self.ends is None and self.window is None


def segments_of(mask: Tensor, rows: int, used: Tensor | None = None) -> Segments | None:
    """Return the segments that a mask describes, None for a mask of another kind. Reads the mask on
    its device, and a few numbers on the host.

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
    place = torch.arange(tokens, device=mask.device)
    counts = mask.sum(-1)  # of the keys that a query sees
    is_real = mask.diagonal(dim1=1, dim2=2)
    is_blind = counts == 0
    begins = torch.where(is_blind, ~_before(is_blind), is_real & (counts == 1))
    first = torch.where(begins, place, 0).cummax(-1).values  # of the query's sequence
    lengths = place - first + 1  # of its sequence, up to it
    window = counts.masked_fill(~is_real, 0).max()
    goes_on = _before(is_real) & (counts == torch.minimum(lengths, window))  # none behind padding
    is_described = (~is_real | begins | goes_on).all() & begins[:, 0].all()
    step = max(1, BLOCK_BYTES // (len(mask) * tokens))
    for start in range(0, tokens, step):
        of = slice(start, start + step)
        behind = place[of, None] - place  # (rows of the block, T)
        seen = (behind >= 0) & (behind < counts[:, of, None])
        is_described &= ((seen == mask[:, of]) | ~is_real[:, of, None]).all()
    is_described &= (is_real if used is None else is_real | ~used).all()
    most = lengths.masked_fill(~is_real, 0).max()
    described = is_described.to(counts.dtype)
    numbers = torch.stack([described, window, most, lengths.max(), begins.sum()])
    described, window, most, longest, sequences = numbers.tolist()
    if not described:
        return None
    ends = None
    if sequences > len(mask):
        starts = begins.expand(rows, tokens).flatten()
        sequences *= rows // len(mask)
        # sorted, because the host knows their number already, and nonzero() would ask the device
        places = torch.arange(len(starts), device=mask.device).where(starts, len(starts))
        ends = torch.cat([places.sort().values[:sequences], places.new_tensor([len(starts)])])
        ends = ends.to(torch.int32)
    return Segments(ends, longest, window if window < most else None)


def _before(tokens: Tensor) -> Tensor:
    """Return (B, T) bool: what holds for the token before each one, False for the first."""
    before = tokens.roll(1, -1)
    before[:, 0] = False
    return before


def serves_flash_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether PyTorch's flash attention serves these (B, num_heads, T, D): their dtype and
    sizes, on this GPU, and nobody has turned it off.
    """
    if not query.is_cuda or torch.version.hip is not None:
        return False
    cuda = torch.backends.cuda
    is_grouped = query.shape[1] != key.shape[1]
    parameters = cuda.SDPAParams(query, key, value, None, 0.0, True, is_grouped)
    return cuda.can_use_flash_attention(parameters)


def segment_attention(
    query: Tensor,  # (B, num_heads, T, D)
    key: Tensor,  # (B, num_key_value_heads, T, D)
    value: Tensor,  # (B, num_key_value_heads, T, D)
    segments: Segments,
    scale: float | None = None,
) -> Tensor:
    """Return the attention (B, T, num_heads, D) of each query to the keys of its segment.

    Args:
        scale: factor on the products of queries and keys; None for 1 / sqrt(D).
    """
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    shape = query.shape
    if segments.ends is not None:
        query, key, value = (each.flatten(0, 1) for each in (query, key, value))
    y = _flash_attention(query, key, value, segments, scale)
    return y.view(shape)


def _flash_attention(
    query: Tensor,  # (B, T, num_heads, D); with several sequences (B T, num_heads, D)
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float | None,
) -> Tensor:
    # the public varlen_attn came with torch 2.10, and takes more of the host's time
    ends, longest, window = segments
    y, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        ends,
        ends,
        longest,
        longest,
        0.0,
        window is None,
        False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )
    return y
