"""One saved tensor of a checkpointed layer: on the device, on the host, or being copied.

Copies run on a stream of their own, so that they overlap with kernels of the model. The host never
waits for a copy.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 16 * 2**20  # of pinned memory: PyTorch rounds its sizes up to a power of two


class Kept:
    """A saved tensor that stays where it is, with the check for writes in place that PyTorch leaves
    out under hooks of saved tensors.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(_modified(self.tensor.shape, self.tensor.dtype))
        return self.tensor


def _modified(shape: torch.Size, dtype: torch.dtype) -> str:
    return (
        f"an input of a checkpointed layer, {dtype} {tuple(shape)}, has been modified by an "
        "inplace operation since it was saved for the backward pass"
    )


class Lane:
    """A side stream of one device, and the pinned memory that only this stream reads and writes.

    All copies to and from a piece of memory run in the order of this stream, so a piece can be used
    again at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device)
        self.is_pinned = device.type != "cpu"
        self.stream = self.module.Stream(device) if self.is_pinned else self.module.Stream()
        self.free: list[Tensor] = []
        self.made = 0

    def pieces(self, count: int) -> list[Tensor] | None:
        """Return pieces of pinned memory; None if the system refuses more."""
        pieces: list[Tensor] = []
        try:
            while len(pieces) < count:
                pieces.append(self._piece())
        except RuntimeError:  # of the allocator
            self.free.extend(pieces)
            return None
        return pieces

    def _piece(self) -> Tensor:
        try:
            return self.free.pop()  # atomic: tensors of other threads come and go
        except IndexError:
            piece = torch.empty(
                PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self.is_pinned
            )
            self.made += 1
            return piece

    def event(self, stream: Any) -> Any:
        """Return an event behind all that has been put on the stream."""
        event = self.module.Event()
        event.record(stream)
        return event


class LayerInput:
    """A saved tensor. It is sent when the next input is saved, and is on the host alone once the
    one after that is saved, or the fused loss begins.

    Its device memory belongs to the stream on which the model computes (``compute``). So that
    stream waits for a copy before the last reference to the memory is dropped.

    Args:
        tensor: the input of a layer.
        lane: that of the tensor's device.
        before: the input that was saved before this one. The backward pass needs it after this one.
    """

    copied: Any = None  # event behind the copy to the host
    fetched: Tensor | None = None
    arrived: Any = None  # event behind the copy to the device
    pieces: Collection[Tensor] = ()

    def __init__(self, tensor: Tensor, lane: Lane, before: weakref.ref[LayerInput] | None) -> None:
        self.source: Tensor | None = tensor
        self.lane = lane
        self.before = before
        self.compute = lane.module.current_stream(tensor.device)
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.size = tensor.numel() * tensor.element_size()
        self.version = tensor._version
        self.is_modified = False
        self.ready = lane.event(self.compute)

    @property
    def earlier(self) -> LayerInput | None:
        """The input that was saved before this one, as long as a graph needs it."""
        return None if self.before is None else self.before()

    def send(self, pieces: Collection[Tensor]) -> None:
        """Start to copy the tensor to the host, in parallel to what the model computes now."""
        lane, source = self.lane, self.source
        assert source is not None
        self.pieces = pieces
        self.ready.wait(lane.stream)
        with torch.no_grad(), lane.module.stream(lane.stream):
            for piece, part in zip(pieces, _parts(source), strict=True):
                piece[: part.numel()].copy_(part, non_blocking=True)
        self.copied = lane.event(lane.stream)

    def release_source(self) -> None:
        """Drop the tensor if it was sent; the model's stream waits for the copy."""
        if self.source is not None:
            self.is_modified |= self.source._version != self.version
            if self.copied is not None:
                self.copied.wait(self.compute)
                self.source = None

    def unpack(self) -> Tensor:
        """Return the tensor on the device, and start to fetch the one that is needed next."""
        source = self.source
        if source is not None:
            self.is_modified |= source._version != self.version
        if self.is_modified:
            raise RuntimeError(_modified(self.shape, self.dtype))
        tensor = self._fetched() if source is None else source
        self.release_source()
        if self.earlier is not None:
            self.earlier.fetch()
        return tensor

    def fetch(self) -> None:
        """Start to copy the tensor back, once the model's stream has done its present work."""
        if self.source is not None or self.fetched is not None:
            return
        lane = self.lane
        with torch.no_grad():
            with lane.module.stream(self.compute):
                tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            # this memory may be in use until here
            lane.event(self.compute).wait(lane.stream)
            with lane.module.stream(lane.stream):
                for piece, part in zip(self.pieces, _parts(tensor), strict=True):
                    part.copy_(piece[: part.numel()], non_blocking=True)
        self.arrived = lane.event(lane.stream)
        self.fetched = tensor

    def _fetched(self) -> Tensor:
        self.fetch()
        tensor, self.fetched = self.fetched, None
        assert tensor is not None
        self.arrived.wait(self.compute)
        current = self.lane.module.current_stream(tensor.device)
        if current != self.compute:
            self.arrived.wait(current)
            tensor.record_stream(current)
        return tensor

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release_source()
            if self.fetched is not None:
                self.arrived.wait(self.compute)
            self.lane.free.extend(self.pieces)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return views of the bytes of a contiguous tensor, a piece of host memory each."""
    return tensor.view(-1).view(torch.uint8).split(PIECE_BYTES)
