"""Detects changes to tensors: logits of other weights than the forward pass saw are refused."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary


class State(NamedTuple):
    """The state of a tensor: two that differ say that it has changed.

    Attributes:
        version: PyTorch's count of writes in place; None for inference tensors.
        steps: of optimizers that hold it: fused ones, and those of bitsandbytes, count no write.
        address, dtype: change where ``tensor.data`` is set.
    """

    version: int | None
    steps: int
    address: int
    dtype: torch.dtype


_optimizer_steps: Any = WeakIdKeyDictionary()  # the few tensors that are watched -> steps


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    watched = list(_optimizer_steps)
    if not watched:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for tensor in watched:
        if id(tensor) in held:
            _optimizer_steps[tensor] += 1


@functools.cache
def watch_optimizers() -> None:
    """Count the steps of optimizers from now on."""
    register_optimizer_step_post_hook(_count_step)


def state_of(tensor: Tensor | None) -> State | None:
    """The state of a tensor now; a write through ``tensor.data`` alone is not seen."""
    if tensor is None:
        return None
    steps = 0
    if tensor.requires_grad and tensor.is_leaf:
        steps = _optimizer_steps.setdefault(tensor, 0)
    local = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
    version = None if local.is_inference() else local._version
    return State(version, steps, local.data_ptr(), tensor.dtype)
