"""Find what rows of a batch begin with alike, and lay their tokens out in one row where each such
prefix is once.

A group of rows shares a prefix, and each of its rows has at least one more token, its own rest. The
one row holds (see ``kernels.segments.Prefixes``)

    the prefixes of all groups    the rests, group by group    the rows of no group

So attention needs no copy of keys. Tokens keep the positions that they have in their own rows.

B: rows, T: tokens of a row, N: tokens of the one row, H: hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import LAYER_ADVICE, check_backward
from liger_patch.kernels.segments import Prefixes, Segments

# of a batch whose rows are compared, all pairs: rows, and bytes that this takes
MOST_ROWS, MOST_COMPARED = 256, 2**27


class Group(NamedTuple):
    """Rows of a batch, and how many tokens all of them begin with alike."""

    tokens: int
    rows: list[int]

    @property
    def saved(self) -> int:
        """How many tokens need not be computed."""
        return self.tokens * (len(self.rows) - 1)


class OneRow(NamedTuple):
    """The tokens of a batch in one row.

    Attributes:
        places: (N,) of its tokens among the B T of the batch.
        positions: (N,) of its tokens in their own rows.
        again: for the second, third, ... row of each group, (n,) places among B T of its prefix;
            these prefixes are the first n tokens of the one row.
        segments: what its queries see.
    """

    places: Tensor
    positions: Tensor
    again: list[Tensor]
    segments: Segments


def compare_rows(ids: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Return (B, B) int64, how many tokens two rows begin with alike, at most all but one. Makes
    B * B * T bytes.

    Args:
        ids: (B, T).
        starts, lengths: (B,) of the real tokens of each row.
    """
    rows, tokens = ids.shape
    place = torch.arange(tokens, device=ids.device)
    row = torch.arange(rows, device=ids.device)[:, None]
    real = ids.gather(1, (starts[:, None] + place).clamp(max=tokens - 1))
    real = real.where(place < lengths[:, None] - 1, -1 - row)  # a number that equals no other row's
    return (real[:, None] != real).view(torch.uint8).argmax(-1)


def groups_of(alike: Sequence[Sequence[int]], rows: list[int]) -> list[Group]:
    """Return groups of rows that share a prefix: all rows as one group, or the groups within the
    parts of them that begin alike beyond that, whichever saves more tokens. Groups are not nested:
    a row is in one at most.

    Args:
        alike: of all pairs of rows, as ``compare_rows`` has it.
    """
    if len(rows) < 2:
        return []
    first, *others = rows
    together = Group(min(alike[first][row] for row in others), rows)
    parts: list[list[int]] = []  # rows that begin alike beyond that
    for row in rows:
        part = next((each for each in parts if alike[each[0]][row] > together.tokens), None)
        if part is None:
            parts.append([row])
        else:
            part.append(row)
    within = [group for part in parts for group in groups_of(alike, part)]
    return [together] if together.saved > sum(each.saved for each in within) else within


def in_one_row(
    starts: list[int], lengths: list[int], tokens: int, groups: list[Group], device: torch.device
) -> OneRow:
    """Lay out the real tokens of a batch.

    Args:
        starts, lengths: of the real tokens of each row.
        tokens: T.
    """
    # largest first: the prefixes that each further rank of rows has are then the first tokens
    groups = sorted(groups, key=lambda group: -len(group.rows))
    begins = [row * tokens + start for row, start in enumerate(starts)]
    grouped = {row for group in groups for row in group.rows}
    rests = [(row, group.tokens) for group in groups for row in group.rows]
    others = [(row, 0) for row, n in enumerate(lengths) if n and row not in grouped]
    # the first token of each segment in its row, and how many it has
    of_rows = [(begins[group.rows[0]], 0, group.tokens) for group in groups]
    of_rows += [(begins[row] + first, first, lengths[row] - first) for row, first in rests + others]
    ends = [length for *_, length in of_rows]
    runs = [
        [(place, length) for place, _, length in of_rows],
        [(position, length) for _, position, length in of_rows],
    ]
    for rank in range(1, max((len(group.rows) for group in groups), default=1)):
        of_rank = [group for group in groups if rank < len(group.rows)]
        runs.append([(begins[group.rows[rank]], group.tokens) for group in of_rank])
    sizes = [sum(length for _, length in each) for each in runs]
    found = _runs([each for several in runs for each in several], sum(sizes), device)
    places, positions, *again = found.split(sizes)
    shared = None
    if groups:
        of_prefixes = [group.tokens for group in groups]
        of_groups = [sum(lengths[row] - g.tokens for row in g.rows) for g in groups]
        cu_seqlens = _ends(of_groups, device), _ends(of_prefixes, device)
        most = max(of_groups), max(of_prefixes)
        shared = Prefixes(sum(of_prefixes), sum(of_groups), cu_seqlens, most)
    segments = Segments(_ends(ends, device), max(ends), None, prefixes=shared)
    return OneRow(places, positions, again, segments)


def _runs(runs: list[tuple[int, int]], count: int, device: torch.device) -> Tensor:
    """Return the numbers of runs (first, length), one behind the other, each rising by one."""
    # not blocking: the host need not wait for the device
    first, length = torch.tensor(runs).T.to(device, non_blocking=True)
    shift = first - (length.cumsum(0) - length)
    return torch.arange(count, device=device) + shift.repeat_interleave(length, output_size=count)


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return ends.to(device, non_blocking=True)


class PutBack(torch.autograd.Function):
    """Put the results (N, H) of one row to their places (B T, H) of the batch, with zeros between.

    A prefix's gradient is the sum of those of all its places, in one order on every run.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, row: OneRow, count: int) -> Tensor:
        padded = hidden.new_zeros(count, hidden.shape[-1])
        for places in (row.places, *row.again):
            padded.index_copy_(0, places, hidden[: len(places)])
        ctx.save_for_backward(row.places, *row.again)
        return padded

    @staticmethod
    def backward(ctx, dpadded: Tensor):
        check_backward("a batch without padding", dpadded, advice=LAYER_ADVICE)
        places, *again = ctx.saved_tensors
        dhidden = dpadded.index_select(0, places)
        if again:
            prefixes = dhidden[: len(again[0])]
            total = prefixes.to(torch.promote_types(prefixes.dtype, torch.float32))
            for each in again:
                total[: len(each)] += dpadded.index_select(0, each)
            prefixes.copy_(total)
        return dhidden, None, None
