"""Record the collectives that this process starts: their kinds and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._pytree import tree_leaves

Collective = tuple[str, int, torch.dtype]  # its name, the numbers in its tensors, their dtype
KINDS = ("gather", "scatter", "reduce", "broadcast", "alltoall")


@contextmanager
def record_collectives() -> Iterator[list[Collective]]:
    """The collectives of all process groups within this context, in their order."""
    recorded: list[Collective] = []
    group: Any = dist.ProcessGroup
    own = {
        name: function
        for name, function in vars(group).items()
        if any(kind in name for kind in KINDS) and not name.startswith("__")
    }
    try:
        for name in own:
            setattr(group, name, _recording(getattr(group, name), name, recorded))
        yield recorded
    finally:
        for name, function in own.items():
            setattr(group, name, function)


def _recording(collective: Callable[..., Any], name: str, recorded: list) -> Callable[..., Any]:
    def start(*arguments: Any, **options: Any) -> Any:
        tensors = [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]
        recorded.append((name, sum(each.numel() for each in tensors), tensors[0].dtype))
        return collective(*arguments, **options)

    return start
