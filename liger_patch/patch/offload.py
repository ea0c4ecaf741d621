"""Offload checkpoints: layer inputs wait for the backward pass in pinned host memory.

Gradient checkpointing keeps the input of each decoder layer, 2 H bytes a token and layer in 16 bits
(H hidden size). ``torch.utils.checkpoint`` saves the arguments of a layer as saved tensors, of both
kinds (``use_reentrant``), so ``torch.autograd.graph.saved_tensors_hooks`` around each of its calls
sees them. What runs inside is hidden from these hooks. Nothing else of a checkpoint changes: not
its random state, nor autocast, nor the order of operations.

An input is copied when the next one is saved: only then is it known that it is not the last one.
The last input is never copied, because the backward pass needs it first. So a copy overlaps with
the next layer.

Memory on the device: up to four inputs in the forward pass, one during the loss, and three in the
backward pass, where the next one arrives while a layer runs. Inputs that the host has no memory for
stay on the device too. They are those of the last layers, which the backward pass frees first.
How much host memory there is: proc_meminfo(5), and the kernel's documents of control groups, v1
and v2, for the limits of a container or a batch job.
"""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_patch.deferred.capture import replace_attribute
from liger_patch.patch.layer_input import PIECE_BYTES, Kept, Lane, LayerInput

GIB = 2**30
MIN_BYTES = 2**20  # smaller inputs take longer to hand over than to copy
FUNCTION = "_gradient_checkpointing_func"  # Transformers: attribute of each checkpointed layer


class CheckpointOffload:
    """The offloaded checkpoints of one patched model. A copy of it starts anew.

    Args:
        device_types: the types of the devices whose tensors are offloaded.
        min_bytes: the least bytes of a tensor that is offloaded.
        host_gib: the most GiB of host memory; None for what the system has available.
    """

    def __init__(
        self,
        device_types: Collection[str] = ("cuda",),
        min_bytes: int = MIN_BYTES,
        host_gib: float | None = None,
    ) -> None:
        self.device_types = device_types
        self.min_bytes = min_bytes
        self.host_gib = host_gib
        self._lanes: dict[torch.device, Lane] = {}
        self.most_pinned = math.inf  # bytes: less than that once pinning has failed
        self._running: _Checkpoints | None = None
        self._status = "on, no eager training step yet"
        self._warned: set[str] = set()

    def __reduce__(self) -> Any:
        return type(self), (self.device_types, self.min_bytes, self.host_gib)

    @contextmanager
    def forward_pass(self, model: nn.Module) -> Iterator[None]:
        """Offload what this forward pass of the model checkpoints."""
        self._running = checkpoints = _Checkpoints(self)
        with ExitStack() as stack:
            stack.callback(setattr, self, "_running", None)
            for module in _checkpointing_modules(model):
                function = vars(module)[FUNCTION]
                if not isinstance(function, _OffloadingCheckpoint):  # the model calls itself
                    offloading = _OffloadingCheckpoint(function, checkpoints)
                    replace_attribute(stack, module, FUNCTION, offloading)
            yield
        if model.training:
            self._status = str(checkpoints)
            if checkpoints.reason is None:
                if checkpoints.kept:
                    stay = f"{checkpoints.stay} of {checkpoints.saved} layer inputs on the GPU"
                    self._warn("host memory", f"keeps {stay}: {checkpoints.shortage}")
            elif not self.host_bytes:  # else only the rows of this step are too short
                self._warn(checkpoints.reason, f"offloads no checkpoint: {checkpoints.reason}")

    def before_loss(self) -> None:
        """Free the device memory of inputs that have been copied to the host: all layers have run,
        and the fused loss needs memory.
        """
        if self._running is not None:
            self._running.drop_copied()

    def _warn(self, subject: str, message: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            warnings.warn(f"liger_patch {message}", stacklevel=4)

    def lane(self, device: torch.device) -> Lane:
        """Return the stream and the pinned memory of a device."""
        return self._lanes.get(device) or self._lanes.setdefault(device, Lane(device))

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are allocated: in use, or free for the next inputs."""
        return PIECE_BYTES * sum(lane.made for lane in self._lanes.values())

    @property
    def has_failed(self) -> bool:
        """Return whether the system has refused memory."""
        return self.most_pinned < math.inf

    @property
    def used_bytes(self) -> int:
        """Bytes of host memory that hold layer inputs."""
        return self.host_bytes - PIECE_BYTES * sum(len(lane.free) for lane in self._lanes.values())

    def bound(self) -> float:
        """Return the bytes that ``host_bytes`` may grow to, as far as is known now."""
        if self.host_gib is not None:
            return min(self.host_gib * GIB, self.most_pinned)
        available = available_bytes()
        most = math.inf if available is None else self.host_bytes + available
        return min(most, self.most_pinned)

    def free(self) -> None:
        """Give the host memory back that no graph waiting for its backward pass needs."""
        is_pinned = any(lane.is_pinned for lane in self._lanes.values())
        self._lanes.clear()
        empty_cache = getattr(torch._C, "_host_emptyCache", None)
        if is_pinned and empty_cache is not None:
            empty_cache()  # PyTorch would keep it for other pinned tensors

    def __str__(self) -> str:
        return self._status


def _checkpointing_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that have a checkpoint function; none within a layer."""
    if FUNCTION in vars(module):
        yield module
    if not isinstance(module, GradientCheckpointingLayer):
        for child in module.children():
            yield from _checkpointing_modules(child)


class _Checkpoints:
    """The layer inputs that one forward pass has checkpointed.

    Attributes:
        calls, saved, sent: numbers of calls of checkpoint functions, of inputs that can be
            offloaded, the last one among them, and of those that were sent to the host.
        kept: for each input that the host had no memory for, the bytes that it needed there.
        last: the input that was saved last, on each device.
    """

    def __init__(self, offload: CheckpointOffload) -> None:
        self.offload = offload
        self.calls = 0
        self.saved = 0
        self.sent = 0
        self.kept: list[int] = []
        self.last: dict[torch.device, weakref.ref[LayerInput]] = {}
        self._bound: float | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"none: {self.reason}"
        mib = self.offload.host_bytes / 2**20
        said = f"{self.sent} layer inputs, {mib:g} MiB of host memory"
        return f"{said}; {self.stay} stay on the GPU: {self.shortage}" if self.kept else said

    @property
    def stay(self) -> int:
        return self.saved - self.sent

    @property
    def shortage(self) -> str:
        """Why more inputs than the last one stay on the device."""
        offload = self.offload
        asked = (offload.used_bytes + sum(self.kept)) / GIB
        bound = (self._bound or 0) / GIB
        if offload.has_failed:
            why = f"no more than {bound:.4g} GiB could be pinned"
        elif offload.host_gib is not None:
            why = f"checkpoint_offload={offload.host_gib:g} allows {bound:.4g} GiB"
        else:
            why = f"{bound:.4g} GiB are available (checkpoint_offload=<GiB> sets another bound)"
        return f"all but the last take {asked:.4g} GiB of host memory, and {why}"

    @property
    def reason(self) -> str | None:
        """Why no input was offloaded, or None."""
        if self.saved:
            return None
        if not self.calls:
            return "no layer was checkpointed (see model.gradient_checkpointing_enable())"
        types, mib = " or ".join(self.offload.device_types), self.offload.min_bytes / 2**20
        return f"no layer saved a contiguous {types} tensor of at least {mib:g} MiB"

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor can be rebuilt from its bytes, and is large enough to offload."""
        return (
            type(tensor) is Tensor
            and tensor.device.type in self.offload.device_types
            and tensor.is_floating_point()
            and tensor.numel() * tensor.element_size() >= max(self.offload.min_bytes, 1)
            and tensor.layout == torch.strided
            and tensor.is_contiguous()
        )

    def save(self, tensor: Tensor) -> LayerInput:
        """Keep an input on the device, since it may be the last, and copy the one before it."""
        before = self.last.get(tensor.device)
        earlier = None if before is None else before()
        if earlier is not None:
            if earlier.earlier is not None:
                earlier.earlier.release_source()
            self._send(earlier)
        saved = LayerInput(tensor, self.offload.lane(tensor.device), before)
        self.last[tensor.device] = weakref.ref(saved)
        self.saved += 1
        return saved

    def drop_copied(self) -> None:
        """Free the device memory of all inputs but the last, and those that the host has no memory
        for.
        """
        for each in self.last.values():
            last = each()
            if last is not None and last.earlier is not None:
                last.earlier.release_source()

    def _send(self, layer_input: LayerInput) -> None:
        """Start to copy a tensor to the host, if it fits there."""
        offload, lane = self.offload, layer_input.lane
        count = -(-layer_input.size // PIECE_BYTES)
        more = PIECE_BYTES * (count - len(lane.free))
        if more > 0 and self._bound is None:
            self._bound = offload.bound()  # once: it reads files
        if more <= 0 or offload.host_bytes + more <= (self._bound or 0):
            pieces = lane.pieces(count)
            if pieces is not None:
                layer_input.send(pieces)
                self.sent += 1
                return
            self._bound = offload.most_pinned = offload.host_bytes  # no more can be pinned
        self.kept.append(PIECE_BYTES * count)


class _OffloadingCheckpoint:
    """A checkpoint function that saves the first large tensor among its arguments on the host.

    That is a decoder layer's hidden states. Other arguments are often shared by all layers.
    """

    def __init__(self, function: Callable[..., Any], checkpoints: _Checkpoints) -> None:
        self.function = function
        self.checkpoints = checkpoints

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.function(*args, **kwargs)
        checkpoints = self.checkpoints
        checkpoints.calls += 1
        is_first = True

        def pack(tensor: Tensor) -> Kept | LayerInput:
            nonlocal is_first
            if is_first and checkpoints.takes(tensor):
                is_first = False
                return checkpoints.save(tensor.detach())
            return Kept(tensor)

        def unpack(packed: Kept | LayerInput) -> Tensor:
            return packed.unpack()

        with saved_tensors_hooks(pack, unpack):
            return self.function(*args, **kwargs)


RESERVED = 16  # one part in so many is left free, for data, state_dicts and other processes
# by version of control groups: the files of limit and use; the entry of cached files in memory.stat
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still take, None on systems that do not report it.

    This is the least of what the machine and each control group above this process have left,
    divided by the number of processes that one launcher has started here (LOCAL_WORLD_SIZE,
    DeepSpeed: LOCAL_SIZE).
    """
    left = [left - whole // RESERVED for whole, left in (*_machine(root), *_groups(root))]
    text = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or ""
    processes = max(1, int(text)) if text.isdecimal() else 1
    return max(0, min(left)) // processes if left else None


def _machine(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the bytes of the machine, and those that are left."""
    kib = _numbers(root / "proc/meminfo")
    if "MemTotal" in kib and "MemAvailable" in kib:
        yield kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group, and what is left of it: cached files count as free."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        limit, use, cached = _NAMES[1 if controllers else 2]
        top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        group = top / path.strip("/")  # in a container, some of its parents may not be there
        for folder in (group, *group.parents):
            whole, used = (_text(folder / name).strip() for name in (limit, use))
            if whole.isdecimal() and used.isdecimal():  # else "max", or no file
                files = _numbers(folder / "memory.stat").get(cached, 0)
                yield int(whole), int(whole) - int(used) + files
            if folder == top:
                break


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file whose lines are a name and a number, and perhaps a unit."""
    words = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:  # another system, or a file that others must not read
        return ""
