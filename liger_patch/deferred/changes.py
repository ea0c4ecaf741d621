"""Detects changes to tensors: logits of other weights than the forward pass saw are refused."""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from liger_patch.kernels.compilation import runs_eagerly


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


_ONE_AT_A_TIME = threading.Lock()
_optimizer_steps: Any = WeakIdKeyDictionary()  # the few tensors that are watched -> steps


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    watched = [ref() for ref in _optimizer_steps.keyrefs()]
    if not watched:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    with _ONE_AT_A_TIME:
        for tensor in watched:
            # DeepSpeed's optimizers hold copies, from which it writes the weights
            if tensor is not None and (id(tensor) in held or hasattr(tensor, "_hp_mapping")):
                _optimizer_steps[tensor] += 1


@functools.cache
def _watch_optimizers() -> None:
    """Count the steps of optimizers from now on: called for the first tensor that is watched."""
    register_optimizer_step_post_hook(_count_step)


@runs_eagerly
def state_of(tensor: Tensor | None) -> State | None:
    """The state of a tensor now; a write through ``tensor.data`` alone is not seen."""
    if tensor is None:
        return None
    steps = 0
    if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
        _watch_optimizers()
        with _ONE_AT_A_TIME:
            steps = _optimizer_steps.setdefault(tensor, 0)
    local = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
    version = None if local.is_inference() else local._version
    return State(version, steps, local.data_ptr(), tensor.dtype)
