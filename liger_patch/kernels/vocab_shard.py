"""A vocabulary that is distributed over the ranks of a process group (tensor parallel): which rows
of a head's weight this rank holds, and the collectives of the operators on them.

Every rank makes the same collectives in the same order. R: ranks, V: vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, distributed


@dataclass(frozen=True)
class VocabShard:
    """The rows of a head's weight that this rank holds; together, those of all ranks are (V, H).

    Attributes:
        group: the process group of the ranks.
        start: the class of this rank's first row.
        vocab_size: V.

    Raises:
        ValueError: names the attribute, its value and what was expected.
    """

    group: Any  # torch.distributed.ProcessGroup, which some builds of PyTorch lack
    start: int
    vocab_size: int

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("vocab_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")

    @property
    def largest(self) -> int:
        """Return the rows of the largest shard of PyTorch's layout, the same on every rank."""
        return -(-self.vocab_size // distributed.get_world_size(self.group))

    def check(self, rows: int) -> None:
        """Raise ValueError unless a weight of so many rows is within the vocabulary."""
        if self.start + rows > self.vocab_size:
            raise ValueError(
                f"weight must have rows within a vocabulary of {self.vocab_size}, got {rows} rows "
                f"from class {self.start}"
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

    def sum_(self, values: Tensor) -> None:
        """Sum values over the ranks, in place."""
        distributed.all_reduce(values, group=self.group)

    def start_sum_(self, values: Tensor) -> Any:
        """Start to sum values over the ranks, in place; wait() of the result ends it."""
        return distributed.all_reduce(values, group=self.group, async_op=True)
