"""Offloaded checkpoints on the meta device: ``checkpoint_offload`` runs there, and copies nothing.

The product decides which layer inputs wait on the host and how long each is on the device. Pieces
of host memory are counted, and one stands for all of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from liger_patch.estimate.trace import MemoryTrace
from liger_patch.patch import offload
from liger_patch.patch.layer_input import PIECE_BYTES, Lane, LayerInput


class MetaOffload(offload.CheckpointOffload):
    """The offloaded checkpoints of a model without values.

    Args:
        host_gib: the most GiB of host memory, None for no bound.
    """

    def __init__(self, host_gib: float | None) -> None:
        bound = math.inf if host_gib is None else host_gib
        super().__init__(("meta",), host_gib=bound)
        self._lane = _CountingLane()

    @property
    def piece(self) -> Tensor:
        """What stands for pieces of host memory."""
        return self._lane.piece

    def lane(self, device: torch.device) -> Lane:
        return self._lanes.setdefault(device, self._lane)


class _CountingLane(Lane):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.piece = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="meta")

    def _piece(self) -> Tensor:
        if self.free:
            return self.free.pop()
        self.made += 1
        return self.piece


def noting_input(memory: MemoryTrace) -> type[LayerInput]:
    """Return a class for ``patch.offload`` that tells a trace of each copy to the host and back."""

    class NotedInput(LayerInput):
        def send(self, pieces) -> None:
            super().send(pieces)
            assert self.source is not None
            memory.note_sent(self.source)

        def fetch(self) -> None:
            before = self.fetched
            super().fetch()
            if self.fetched is not before and self.fetched is not None:
                memory.note_fetched(self.fetched)

    return NotedInput


def host_bytes(size: float) -> int:
    """Return the bytes of host memory that a layer input of so many bytes takes."""
    return PIECE_BYTES * math.ceil(size / PIECE_BYTES)
