"""Whether a tensor is still what it was: to refuse logits that would be those of another model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary


class State(NamedTuple):
    """What tells a tensor from itself after a change.

    Attributes:
        version: PyTorch's count of writes in place; None for inference tensors.
        steps: of optimizers that hold it: fused ones, and those of bitsandbytes, count no write.
        address, dtype: change where ``tensor.data`` is set.
    """

    version: int | None
    steps: int
    address: int
    dtype: torch.dtype


_optimizer_steps: Any = WeakIdKeyDictionary()  # tensors that somebody asked for -> steps


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in _optimizer_steps:
                _optimizer_steps[parameter] += 1


register_optimizer_step_post_hook(_count_step)


def state_of(tensor: Tensor | None) -> State | None:
    """The state of a tensor now; a write through ``tensor.data`` alone is not seen."""
    if tensor is None:
        return None
    version = None if tensor.is_inference() else tensor._version
    steps = _optimizer_steps.setdefault(tensor, 0) if tensor.requires_grad else 0
    return State(version, steps, tensor.data_ptr(), tensor.dtype)
