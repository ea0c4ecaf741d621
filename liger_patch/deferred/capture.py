"""Make the head return deferred logits, for the duration of one forward pass."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_patch.deferred.engines import in_process_group, is_partitioned
from liger_patch.deferred.kept_weight import Hold, keeping_weight
from liger_patch.deferred.record import Head, HeadCall, Owner
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.deferred.tensor_parallel import (
    DistributedLogits,
    distributed_inputs,
    distributed_product,
    local_tensor,
)
from liger_patch.kernels.backend import autocast_dtype, wider, without_autocast
from liger_patch.kernels.graphs import runs_eagerly
from liger_patch.readers.quantized_weights import FORWARD

# as torch defines it: DeepSpeed replaces nn.functional.linear
LINEAR = cast(Any, torch._C)._nn.linear


class _DeferLinear(TorchFunctionMode):
    """Defer the products that give logits within the head's own forward: the product with the
    head's weight, and those of adapters on the head.

    Args:
        hold: what keeps a gathered weight until the backward pass; None where nothing frees it.
    """

    def __init__(self, head: Head, hold: Hold | None) -> None:
        super().__init__()
        self.head, self.hold = head, hold
        # read now: during the head's forward, Transformers puts local tensors in their place
        parameters = head.module._parameters
        self.whole = parameters.get("weight"), parameters.get("bias")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        logits = self._deferred(*args, **kwargs) if func is LINEAR else None
        return func(*args, **kwargs) if logits is None else logits

    def _deferred(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> DeferredLogits | None:
        """Return the deferred product; None for a product that gives no logits, or is not plain."""
        if not self._gives_logits(weight):
            return None
        inputs = input, weight, bias
        distributed = distributed_inputs(*inputs, self.whole)
        if distributed is None and (len(weight) == 0 or not _can_defer(*inputs)):
            return None
        if distributed is not None and not _can_defer(*map(local_tensor, distributed)):
            return None
        x, weight, bias = distributed or inputs
        if self.hold is not None:
            x, weight, bias = self.hold(x, weight, bias)
        if distributed is not None:
            call = HeadCall.of(x, weight, bias, self.head, product=distributed_product)
            return DistributedLogits.of_head(call)
        if not self.head.owner.widens:
            return DeferredLogits.of_head(HeadCall.of(x, weight, bias, self.head))
        wide = wider(autocast_dtype(x.device.type) or weight.dtype)
        bias = None if bias is None else bias.to(wide)
        with without_autocast(x.device.type):
            return DeferredLogits.of_head(HeadCall.of(x.to(wide), weight.to(wide), bias, self.head))

    def _gives_logits(self, weight: Tensor) -> bool:
        module = self.head.module
        if weight.dim() == 2 and len(weight) == getattr(module, "out_features", None):
            return True
        if is_partitioned(
            weight
        ):  # reading PEFT's ``module.weight`` would gather the base's weight
            return weight is module._parameters.get("weight")
        return weight is getattr(module, "weight", None)


def _can_defer(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether these are plain floating-point tensors that fit each other, on one device."""
    dtypes = set()
    for tensor in (hidden_states, weight) if bias is None else (hidden_states, weight, bias):
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or not tensor.is_floating_point() or tensor.device != weight.device:
            return False
        dtypes.add(tensor.dtype)
    if weight.dim() != 2 or weight.is_meta or weight.shape[1] != hidden_states.shape[-1]:
        return False
    if torch.is_autocast_enabled(weight.device.type):
        return torch.float64 not in dtypes
    return len(dtypes) == 1


def defer_head(stack: ExitStack, model: nn.Module, module: nn.Module, owner: Owner) -> None:
    """Make the head return deferred logits until the stack is closed.

    The head's hooks run as always, and so does a ``forward`` that somebody has put on the head. A
    head that does not multiply by a plain weight (a quantized one, a tensor subclass) returns its
    real logits.

    Args:
        stack: undoes it.
        model: the patched model.
        module: its output embedding.
        owner: the forward pass.
    """
    head = Head(model, module, owner)
    hold = None
    if in_process_group():
        hold = stack.enter_context(keeping_weight(model, module))
    linear: Any = nn.functional.linear
    if linear is not LINEAR and linear.__module__.startswith("deepspeed"):
        for layer in module.modules():  # the head itself may be one
            is_plain = type(layer).forward is FORWARD and "forward" not in vars(layer)
            if is_plain and isinstance(layer, nn.Linear):
                _replace_forward(stack, layer, functools.partial(_linear_forward, layer))
    # of a head that torch.compile has wrapped, run the module inside: a graph would compute the
    # product
    forward = module._modules.get("_orig_mod") or module.forward
    is_unhooked = getattr(forward, "__func__", None) is FORWARD  # a product, and no hook after it

    def deferring_forward(*args, **kwargs):
        with _DeferLinear(head, hold):
            logits = forward(*args, **kwargs)
        owner.head_defers = isinstance(logits, DeferredLogits)
        if not is_unhooked and isinstance(logits, DeferredLogits) and logits.is_outdated:
            return forward(*args, **kwargs)  # a hook has cast or freed the weight since
        return logits

    _replace_forward(stack, module, deferring_forward)


def _replace_forward(stack: ExitStack, module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of this one module for calls of this thread, until the stack is
    closed.
    """
    of_thread = functools.partial(
        _forward_of_thread, threading.get_ident(), forward, module.forward
    )
    replace_attribute(stack, module, "forward", of_thread)


@runs_eagerly  # with all that is within: torch.compile breaks the graph once
def _forward_of_thread(
    thread: int, forward: Callable, original: Callable, *args: Any, **kwargs: Any
) -> Any:
    return (forward if threading.get_ident() == thread else original)(*args, **kwargs)


def replace_attribute(stack: ExitStack, module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute of this one module, which is no module or tensor, until the stack is
    closed.
    """
    attributes = vars(module)
    if name in attributes:
        stack.callback(attributes.__setitem__, name, attributes[name])
    else:
        stack.callback(attributes.pop, name, None)
    attributes[name] = value


def _linear_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return LINEAR(x, layer.weight, layer.bias)
