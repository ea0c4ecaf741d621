"""Gradient checkpoints on the host, as ``checkpoint_offload`` keeps them, without values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_patch.patch.offload import MIN_BYTES


class _Offloaded:
    """The checkpoints of a forward pass that are on the host, in the order of their layers."""

    def __init__(self) -> None:
        self.tensors: list[Tensor | None] = []
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []

    def send(self, tensor: Tensor) -> int:
        self.tensors.append(tensor.detach())
        self.shapes.append((tensor.shape, tensor.dtype))
        for i in range(len(self.tensors) - 2):  # a copy overlaps with the next layer
            self.tensors[i] = None
        return len(self.tensors) - 1

    def fetch(self, index: int) -> Tensor:
        """Return a tensor, with the one that is needed next on its way."""
        for i in (index, index - 1):
            if i >= 0 and self.tensors[i] is None:
                shape, dtype = self.shapes[i]
                self.tensors[i] = torch.empty(shape, dtype=dtype, device="meta")
        tensor, self.tensors[index] = self.tensors[index], None
        assert tensor is not None
        return tensor


def offload_checkpoints(model: Any) -> None:
    """Send the input of each checkpointed layer to the host, as ``checkpoint_offload`` does."""
    sent = _Offloaded()
    modules: list[Any] = list(model.modules())
    for module in modules:
        if isinstance(module, GradientCheckpointingLayer):
            layer: Any = module
            function = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = functools.partial(_offloading, function, sent)


def _offloading(function: Callable[..., Any], sent: _Offloaded, *args: Any, **kwargs: Any) -> Any:
    is_first = True

    def pack(tensor: Tensor) -> int | Tensor:
        nonlocal is_first
        if is_first and tensor.is_floating_point() and tensor.nbytes >= MIN_BYTES:
            is_first = False
            return sent.send(tensor)
        return tensor

    def unpack(packed: int | Tensor) -> Tensor:
        return packed if isinstance(packed, Tensor) else sent.fetch(packed)

    with saved_tensors_hooks(pack, unpack):
        return function(*args, **kwargs)
