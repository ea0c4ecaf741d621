"""Tell whether a layer's code is Transformers' own, and whether a call may run on a kernel."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from torch.utils import checkpoint
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from liger_patch.kernels.backend import autocast_dtype, is_traced
from liger_patch.kernels.rms_norm import NormInputs
from liger_patch.kernels.sliced import slice_tokens

PRODUCT = nn.Linear.forward, nn.functional.linear  # as torch defines them: others replace them
LONG_INPUT_BYTES = 128 * 2**20  # of x: 16k tokens of 4096 features in 16 bits
# the hooks of saved tensors; torch 2.6 has no such function
TOP_HOOKS = getattr(cast(Any, torch._C)._autograd, "_top_saved_tensors_default_hooks", None)


def names_of(cls: Any) -> frozenset[str]:
    """Return the names in the code of a class's forward; none where that is no Python function."""
    code = getattr(cls.forward, "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def is_transformers(function: Any) -> bool:
    """Return whether a function is defined in Transformers: a replaced one is not."""
    return getattr(function, "__module__", "").startswith("transformers.")


def needs_own_code(*arguments: object) -> bool:
    """Return whether a layer's own code must run.

    It must where torch.func transforms the call: the kernels have no rules for that. It must, too,
    where an argument is a tensor without memory of its own, which a kernel cannot read: a DTensor,
    or the result of a collective that has not finished.
    """
    if torch._C._are_functorch_transforms_active():
        return True
    # most arguments are of these two classes, and this test is the faster one
    return any(
        type(each) not in (Tensor, nn.Parameter) and is_traceable_wrapper_subclass(each)
        for each in arguments
    )


def packs_saved_tensors() -> bool:
    """Return whether hooks take the tensors that autograd saves for the backward pass.

    Gradient checkpointing has such hooks, and so has offloading.
    """
    if TOP_HOOKS is None or torch.compiler.is_compiling():
        return False
    return TOP_HOOKS(False) is not None


def is_checkpointed() -> bool:
    """Return whether gradient checkpointing runs a layer now: for the first time, or again.

    Non-reentrant checkpointing has hooks of saved tensors, both times. Reentrant checkpointing runs
    a layer without gradients, as evaluation does, and then within the backward pass. False with
    torch 2.6, which does not tell its hooks.
    """
    if TOP_HOOKS is None or torch.compiler.is_compiling():
        return False
    if not torch.is_grad_enabled():
        return True
    hooks = TOP_HOOKS(False)
    if hooks is None:
        return torch._C._current_graph_task_id() != -1
    return getattr(hooks[0], "__module__", None) == checkpoint.__name__


def tokens_of_slice(x: Tensor, size: int) -> int | None:
    """Return in slices of how many tokens a feed-forward layer of x (..., H) runs; None for all at
    once: where a row is short, and where what the layer keeps is not computed again.

    Args:
        size: the intermediate size.
    """
    if torch.compiler.is_compiling() or x.dim() == 0:
        return None
    itemsize = (autocast_dtype(x.device.type) or x.dtype).itemsize
    tokens = slice_tokens(math.prod(x.shape[:-1]), size, itemsize)
    if tokens is None or torch._C._is_tracing() or is_traced() or not is_checkpointed():
        return None
    return tokens


def note_source(y: Tensor, x: Tensor, weight: Tensor | None, *how: Any) -> None:
    """Note on a norm's result what it is the norm of, where it is long, and the layer that runs is
    computed again: a layer behind the norm need not keep both.

    Args:
        how: eps, offset and dtype of the norm.
    """
    if torch.compiler.is_compiling() or y.dim() > 3:  # of queries or keys: nothing keeps these
        return
    if y.nbytes <= LONG_INPUT_BYTES or is_traced():
        return
    if torch.is_grad_enabled() and is_checkpointed():
        noted: Any = y
        source = NormInputs(x.detach(), weight, *how)
        noted._liger_patch_source = source, x._version, y._version


def source_of(x: Tensor) -> NormInputs | None:
    """Return what ``note_source`` has noted, None where x or its source has changed since."""
    noted = getattr(x, "_liger_patch_source", None)
    if noted is None:
        return None
    source, *versions = noted
    return source if [source.x._version, x._version] == versions else None


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module does more than its class's forward."""
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
