"""Record what one training step allocates and frees, from the sizes of tensors on the meta device.

A dispatch mode sees every operation of forward and backward pass. Tensors on the meta device have
sizes and lifetimes, but no values: a model of any size is traced in seconds, without its weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BLOCK_BYTES = 512  # CUDA's caching allocator rounds sizes up to this
LAYER, HEAD, OTHER = "layer", "head", "other"  # where a tensor of the forward pass is made
HEAD_BACKWARD, BACKWARD = "head backward", "backward"

PRODUCTS = (
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.linear,
)


@dataclass
class Allocation:
    """One piece of memory: its size, when it lives, and where it is made.

    Attributes:
        place: LAYER, HEAD, OTHER, HEAD_BACKWARD or BACKWARD.
        birth, death: numbers of events; a piece without death lives on behind the step.
        call_end: the event behind the module's call that made it, for pieces of LAYER.
        is_gradient: whether it ends up as the gradient of a parameter.
        purpose: what it is, where the code that makes it says so.
    """

    size: int
    place: str
    birth: int
    death: int | None = None
    call_end: int | None = None
    is_gradient: bool = False
    purpose: str = ""


@dataclass
class Trace:
    """The pieces of memory of one step.

    Attributes:
        forward_end: the event between both passes.
        sent: the pieces that are copied to the host.
    """

    allocations: list[Allocation] = field(default_factory=list)
    events: int = 0
    forward_end: int = 0
    sent: list[Allocation] = field(default_factory=list)

    def alive(self, event: int) -> list[Allocation]:
        """Return the pieces that exist at an event."""
        return [
            each
            for each in self.allocations
            if each.birth <= event and (each.death is None or event < each.death)
        ]

    def peak(self) -> tuple[int, int]:
        """Return the most bytes that exist at once, and the event from which on they do."""
        changes = [0] * (self.events + 2)
        for each in self.allocations:
            changes[each.birth] += each.size
            if each.death is not None:
                changes[each.death] -= each.size
        total = most = where = 0
        for event, change in enumerate(changes):
            total += change
            if total > most:
                most, where = total, event
        return most, where


class MemoryTrace(TorchDispatchMode):
    """Record the memory of all tensors that are made within this context.

    Args:
        held: tensors that exist before, and are not counted.
        unpacked: weights that are held in 4 or 8 bits: each product makes a 16-bit copy for itself.
    """

    def __init__(self, held: Sequence[Tensor], unpacked: Collection[Tensor] = ()) -> None:
        super().__init__()
        self.trace = Trace()
        self.place = OTHER
        self.purpose = ""
        self.is_closed = False
        self._open: list[Allocation] = []  # of the layer that runs
        self._made: dict[int, Allocation] = {}  # by storage
        self._held = {_key(each) for each in held}
        self._unpacked = {_key(each) for each in unpacked}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # Transformers asks: is no row packed, is no token padding?
        result = func(*args, **(kwargs or {}))
        copies = []
        if self._unpacked and func.overloadpacket in PRODUCTS:
            weights = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            weights = [each for each in weights if _key(each) in self._unpacked]
            copies = [self._allocate(each.numel() * each.element_size()) for each in weights]
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._see(each)
        for each in copies:  # they are there until the product is
            each.death = self._next()
        return result

    def _see(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self._made or key in self._held or tensor.device.type != "meta":
            return
        storage = tensor.untyped_storage()
        allocation = self._allocate(storage.nbytes())
        self._made[key] = allocation
        weakref.finalize(storage, self._free, key)

    def _allocate(self, size: int) -> Allocation:
        size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        allocation = Allocation(size, self.place, self._next(), purpose=self.purpose)
        self.trace.allocations.append(allocation)
        if self.place == LAYER:
            self._open.append(allocation)
        return allocation

    def _free(self, key: int) -> None:
        allocation = self._made.pop(key)
        if not self.is_closed:
            allocation.death = self._next()

    def _next(self) -> int:
        self.trace.events += 1
        return self.trace.events

    def enter(self, place: str) -> None:
        """Count what is made from here on to a place of the forward pass."""
        if not self.trace.forward_end:
            self.place = place

    def leave_layer(self) -> None:
        """Note that the layer that ran has returned."""
        if self.trace.forward_end:
            return
        event = self._next()
        for each in self._open:
            each.call_end = event
        self._open = []
        self.place = OTHER

    @contextmanager
    def naming(self, purpose: str) -> Iterator[None]:
        """Name the purpose of what is made within this context."""
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    def note_sent(self, tensor: Tensor) -> None:
        """Note that a tensor is copied to the host."""
        self.trace.sent.append(self._made[_key(tensor)])

    def start_backward(self) -> None:
        """Note that the forward pass has ended."""
        self.trace.forward_end = self._next()
        self.place = HEAD_BACKWARD

    def leave_head(self) -> None:
        """Note that the backward pass has left the head."""
        if self.trace.forward_end:
            self.place = BACKWARD

    def finish(self, gradients: Sequence[Tensor]) -> Trace:
        """End the step: what is freed from here on does not count. Return the trace, with the
        gradients of parameters marked.
        """
        self.is_closed = True
        for each in gradients:
            if _key(each) in self._made:
                self._made[_key(each)].is_gradient = True
        return self.trace


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
