"""What the code of a layer is, and whether a call of it can be another call."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# of saved tensors, which torch 2.6 does not tell
TOP_HOOKS = getattr(cast(Any, torch._C)._autograd, "_top_saved_tensors_default_hooks", None)


def names_of(cls: Any) -> frozenset[str]:
    """In the code of its forward, where it has some."""
    code = getattr(cls.forward, "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def is_transformers(function: Any) -> bool:
    """Whether a function is Transformers' own: nobody has replaced it by another."""
    return getattr(function, "__module__", "").startswith("transformers.")


def needs_own_code(*arguments: object) -> bool:
    """Return True if a layer's own code must run: torch.func transforms the call, for which the
    kernels have no rules, or a tensor holds others instead of numbers (DTensor, and what
    collectives return before they have finished), which is no memory that a kernel can read.
    """
    if torch._C._are_functorch_transforms_active():
        return True
    # most are of these two classes, which is faster to find out
    return any(
        type(each) not in (Tensor, nn.Parameter) and is_traceable_wrapper_subclass(each)
        for each in arguments
    )


def packs_saved_tensors() -> bool:
    """Whether hooks take what is kept for the backward pass: those of gradient checkpointing, or of
    offloading.
    """
    if TOP_HOOKS is None or torch.compiler.is_compiling():
        return False
    return TOP_HOOKS(False) is not None


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its class's forward."""
    return bool(
        _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )
