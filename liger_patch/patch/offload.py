"""Offload checkpoints: layer inputs wait for the backward pass in pinned host memory.

Gradient checkpointing keeps the input of each decoder layer, 2 H bytes a token and layer in 16 bits
(H hidden size). ``torch.utils.checkpoint`` saves the arguments of a layer as saved tensors, of both
kinds (``use_reentrant``), so ``torch.autograd.graph.saved_tensors_hooks`` around each of its calls
sees them. What runs inside is hidden from these hooks. Nothing else of a checkpoint changes: not
its random state, nor autocast, nor the order of operations.

Memory on the device: one input in the forward pass (its copy overlaps with the layer), two in the
backward pass (the next one arrives while a layer runs). The last input stays where it is.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

PIECE_BYTES = 16 * 2**20  # of pinned memory: PyTorch rounds its sizes up to a power of two
MIN_BYTES = 2**20  # smaller inputs take longer to hand over than to copy
FUNCTION = "_gradient_checkpointing_func"  # Transformers: attribute of each checkpointed layer


class CheckpointOffload:
    """The offloaded checkpoints of one patched model. A copy of it starts anew.

    Args:
        device_types: whose tensors are offloaded.
        min_bytes: of a tensor that is offloaded.
    """

    def __init__(
        self, device_types: Collection[str] = ("cuda",), min_bytes: int = MIN_BYTES
    ) -> None:
        self.device_types = device_types
        self.min_bytes = min_bytes
        self._lanes: dict[torch.device, _Lane] = {}
        self._sent: int | None = None  # in the last forward pass
        self._reason: str | None = None
        self._warned: set[str | None] = set()

    def __reduce__(self) -> Any:
        return type(self), (self.device_types, self.min_bytes)

    @contextmanager
    def forward_pass(self, model: nn.Module) -> Iterator[None]:
        """Offload what this forward pass of the model checkpoints."""
        forward_pass = _ForwardPass(self)
        replaced: list[tuple[nn.Module, Callable[..., Any]]] = []
        try:
            for module in _checkpointing_modules(model):
                function = vars(module)[FUNCTION]
                if not isinstance(function, _OffloadingCheckpoint):  # the model calls itself
                    replaced.append((module, function))
                    setattr(module, FUNCTION, _OffloadingCheckpoint(function, forward_pass))
            yield
        finally:
            for module, function in replaced:
                setattr(module, FUNCTION, function)
        if model.training:
            self._sent, self._reason = forward_pass.sent, forward_pass.reason
            # not where only some rows are short
            if self._reason not in {None, *self._warned} and not self.host_bytes:
                self._warned.add(self._reason)
                warnings.warn(f"liger_patch offloads no checkpoint: {self._reason}", stacklevel=2)

    def lane(self, device: torch.device) -> _Lane:
        """Return the stream and the pinned memory of a device."""
        return self._lanes.get(device) or self._lanes.setdefault(device, _Lane(device))

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory, in use or ready for the next step."""
        return PIECE_BYTES * sum(lane.made for lane in self._lanes.values())

    def free(self) -> None:
        """Give the host memory back that no graph waiting for its backward pass needs."""
        is_pinned = any(lane.is_pinned for lane in self._lanes.values())
        self._lanes.clear()
        empty_cache = getattr(torch._C, "_host_emptyCache", None)
        if is_pinned and empty_cache is not None:
            empty_cache()  # PyTorch would keep it for other pinned tensors

    def __str__(self) -> str:
        if self._sent is None:
            return "on, no eager training step yet"
        if self._reason is not None:
            return f"none: {self._reason}"
        return f"{self._sent} layer inputs, {self.host_bytes / 2**20:g} MiB of host memory"


def _checkpointing_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that have a checkpoint function; none within a layer."""
    if FUNCTION in vars(module):
        yield module
    if not isinstance(module, GradientCheckpointingLayer):
        for child in module.children():
            yield from _checkpointing_modules(child)


class _ForwardPass:
    """What one forward pass has checkpointed.

    Attributes:
        calls: of checkpoint functions.
        sent: how many inputs were offloaded.
        last: the last one of each device.
    """

    def __init__(self, offload: CheckpointOffload) -> None:
        self.offload = offload
        self.calls = 0
        self.sent = 0
        self.last: dict[torch.device, weakref.ref[_Sent]] = {}

    @property
    def reason(self) -> str | None:
        """Why no input was offloaded, or None."""
        if self.sent:
            return None
        if not self.calls:
            return "no layer was checkpointed (see model.gradient_checkpointing_enable())"
        types, mib = " or ".join(self.offload.device_types), self.offload.min_bytes / 2**20
        return f"no layer saved a {types} tensor of at least {mib:g} MiB"

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor can be rebuilt from its bytes, and is worth it."""
        return (
            type(tensor) is Tensor
            and tensor.device.type in self.offload.device_types
            and tensor.is_floating_point()
            and tensor.numel() * tensor.element_size() >= max(self.offload.min_bytes, 1)
            and tensor.layout == torch.strided
            and (
                tensor.is_contiguous()
                # preserves the strides of those without gaps or overlaps
                or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
            )
        )

    def send(self, tensor: Tensor) -> _Sent:
        """Start to copy a tensor to the host."""
        before = self.last.get(tensor.device)
        earlier = None if before is None else before()
        if earlier is not None:
            earlier.release_source()
        sent = _Sent(tensor, self.offload.lane(tensor.device), before)
        self.last[tensor.device] = weakref.ref(sent)
        self.sent += 1
        return sent


class _OffloadingCheckpoint:
    """A checkpoint function that saves the first large tensor among its arguments on the host.

    That is a decoder layer's hidden states. Other arguments are often shared by all layers.
    """

    def __init__(self, function: Callable[..., Any], forward_pass: _ForwardPass) -> None:
        self.function = function
        self.forward_pass = forward_pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.function(*args, **kwargs)
        forward_pass = self.forward_pass
        forward_pass.calls += 1
        is_first = True

        def pack(tensor: Tensor) -> _Sent | _Kept:
            nonlocal is_first
            if is_first and forward_pass.takes(tensor):
                is_first = False
                return forward_pass.send(tensor.detach())
            return _Kept(tensor)

        def unpack(packed: _Sent | _Kept) -> Tensor:
            return packed.unpack()

        with saved_tensors_hooks(pack, unpack):
            return self.function(*args, **kwargs)


class _Kept:
    """A saved tensor as it is, and the check that PyTorch leaves out where there are hooks."""

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


class _Lane:
    """A side stream of one device, and the pinned memory to which only this stream copies.

    So copies in and out of a piece of memory have an order, and it can be used again at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device)
        self.is_pinned = device.type != "cpu"
        self.stream = self.module.Stream(device) if self.is_pinned else self.module.Stream()
        self.free: list[Tensor] = []
        self.made = 0

    def pieces(self, size: int) -> list[Tensor]:
        """Return pieces of memory for so many bytes."""
        return [self._piece() for _ in range(0, size, PIECE_BYTES)]

    def _piece(self) -> Tensor:
        try:
            return self.free.pop()  # atomic: tensors of other threads come and go
        except IndexError:
            self.made += 1
            return torch.empty(
                PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self.is_pinned
            )

    def event(self, stream: Any) -> Any:
        """Return an event behind all that has been put on the stream."""
        event = self.module.Event()
        event.record(stream)
        return event


class _Sent:
    """A tensor whose values are on the host; as long as no later one is sent, on the device too.

    Device memory is that of the stream on which the model computes (``compute``): this stream
    waits for a copy before any reference to its memory is dropped.
    """

    source: Tensor | None = None
    copied: Any = None  # event behind the copy to the host
    fetched: Tensor | None = None
    arrived: Any = None  # event behind the copy to the device
    pieces: Collection[Tensor] = ()

    def __init__(self, tensor: Tensor, lane: _Lane, before: weakref.ref[_Sent] | None) -> None:
        self.lane = lane
        self.before = before  # sent before this one, needed after it
        self.compute = lane.module.current_stream(tensor.device)
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device
        self.version = tensor._version
        self.is_modified = False
        self.pieces = lane.pieces(tensor.numel() * tensor.element_size())
        lane.event(self.compute).wait(lane.stream)
        with torch.no_grad(), lane.module.stream(lane.stream):
            for piece, part in zip(self.pieces, _parts(tensor), strict=True):
                piece[: part.numel()].copy_(part, non_blocking=True)
        self.copied = lane.event(lane.stream)
        self.source = tensor

    def release_source(self) -> None:
        """Drop the tensor that was sent; the model's stream waits for the copy."""
        if self.source is not None:
            self.is_modified |= self.source._version != self.version
            self.copied.wait(self.compute)
            self.source = None

    def unpack(self) -> Tensor:
        """Return the tensor on the device, and start to fetch the one that is needed next."""
        tensor = self.source
        self.release_source()
        if self.is_modified:
            raise RuntimeError(_modified(self.shape, self.dtype))
        if tensor is None:
            tensor = self._fetched()
        earlier = None if self.before is None else self.before()
        if earlier is not None:
            earlier.fetch()
        return tensor

    def fetch(self) -> None:
        """Start to copy the tensor back, behind what the model's stream does now."""
        if self.source is not None or self.fetched is not None:
            return
        lane = self.lane
        with torch.no_grad():
            with lane.module.stream(self.compute):
                tensor = torch.empty_strided(
                    self.shape, self.stride, dtype=self.dtype, device=self.device
                )
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
    """Return views of the bytes of a tensor without gaps, a piece of host memory each."""
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return flat.split(PIECE_BYTES)
