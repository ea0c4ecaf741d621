"""A vocabulary that is distributed over the ranks of a process group (tensor parallel): which rows
of a head's weight this rank holds, and the collectives of the operators on them.

Every rank makes the same collectives in the same order. R: ranks, V: vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, distributed


@dataclass(frozen=True)
class VocabShard:
    """The rows of a head's weight that this rank holds, as PyTorch's DTensor shards (V, H): each
    rank ceil(V / R) rows, in the order of the ranks; the last ones fewer, or none.

    Attributes:
        group: the process group of the ranks; None for the default one.
        vocab_size: V.

    Raises:
        ValueError: names the attribute, its value and what was expected.
    """

    group: Any  # torch.distributed.ProcessGroup, which some builds of PyTorch lack
    vocab_size: int

    def __post_init__(self) -> None:
        size = self.vocab_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"vocab_size must be a whole number >= 1, got {size!r}")

    @cached_property
    def largest(self) -> int:
        """Return the rows of the largest shard, the same on every rank."""
        return -(-self.vocab_size // distributed.get_world_size(self.group))

    @cached_property
    def start(self) -> int:
        """Return the class of this rank's first row."""
        return min(distributed.get_rank(self.group) * self.largest, self.vocab_size)

    def check(self, rows: int) -> None:
        """Raise ValueError unless a weight has this rank's number of rows. Each rank knows only of
        its own.
        """
        expected = min(self.largest, self.vocab_size - self.start)
        if rows != expected:
            raise ValueError(
                f"weight must have {expected} rows on rank {distributed.get_rank(self.group)}, "
                f"from class {self.start} of {self.vocab_size} on, got {rows}"
            )

    def gather(self, numbers: Tensor) -> Tensor:
        """Return (R, ...) the numbers of all ranks, in their order."""
        ranks = distributed.get_world_size(self.group)
        gathered = numbers.new_empty(ranks, *numbers.shape)
        # into one tensor: to a list of them NCCL copies what it has gathered elsewhere
        gather = getattr(distributed, "all_gather_single", None)  # its name from torch 2.13 on
        gather = gather or distributed.all_gather_into_tensor
        gather(gathered.flatten(0, 1), numbers, group=self.group)
        return gathered

    def start_sum_(self, values: Tensor) -> Any:
        """Start to sum values over the ranks, in place; wait() of the result ends it."""
        return distributed.all_reduce(values, group=self.group, async_op=True)
