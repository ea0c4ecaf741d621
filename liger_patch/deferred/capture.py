"""For the duration of one forward pass, the output embedding returns deferred logits."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_patch.deferred.head_call import HeadCall, Owner
from liger_patch.deferred.ops import Step
from liger_patch.deferred.tensor import DeferredLogits


class _DeferLinear(TorchFunctionMode):
    """Within the head's own forward: products that give logits are deferred, that with its own
    weight, and those of adapters beside it.
    """

    def __init__(self, model: nn.Module, head: nn.Module, owner: Owner) -> None:
        super().__init__()
        self.model, self.head, self.owner = model, head, owner

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            hidden_states, weight, bias = _linear_arguments(*args, **kwargs)
            if self._gives_logits(weight) and _can_defer(hidden_states, weight, bias):
                call = HeadCall.of(hidden_states, weight, bias, self.model, self.owner)
                return DeferredLogits.of_head(call)
        if func in (torch.clone, Tensor.clone) and not kwargs and len(args) == 1:
            (logits,) = args
            if isinstance(logits, DeferredLogits):  # PEFT's, of what a quantised layer returns
                return logits.then(Step("clone", Tensor.clone))
        return func(*args, **kwargs)

    def _gives_logits(self, weight: Tensor) -> bool:
        if weight is getattr(self.head, "weight", None):
            return True
        return weight.dim() == 2 and len(weight) == getattr(self.head, "out_features", None)


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _can_defer(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are plain floating-point tensors that fit each other, on one device."""
    tensors = [tensor for tensor in (hidden_states, weight, bias) if tensor is not None]
    if any(
        type(tensor) not in (Tensor, nn.Parameter)
        or not tensor.is_floating_point()
        or tensor.layout != torch.strided
        for tensor in tensors
    ):
        return False
    if len({tensor.device for tensor in tensors}) > 1 or weight.dim() != 2 or weight.is_meta:
        return False
    if weight.shape[1] != hidden_states.shape[-1] or weight.shape[0] == 0:
        return False
    dtypes = {tensor.dtype for tensor in tensors}
    if torch.is_autocast_enabled(weight.device.type):
        return torch.float64 not in dtypes
    return len(dtypes) == 1


@contextmanager
def deferring_head(model: nn.Module, head: nn.Module, owner: Owner) -> Iterator[None]:
    """Within this context ``head``, the model's output embedding, defers its product with its
    weight.

    Its hooks and whatever has replaced its ``forward`` run as always; a head that computes in
    another way (a tensor subclass, a quantised layer that nothing here reads) returns its real
    logits.
    """
    with ExitStack() as stack:
        for layer in _quantized_layers(head):
            stack.enter_context(_forward(layer, _quantized_forward(layer, model, owner)))
        # of a head that torch.compile has wrapped, the head: its product is not computed here
        forward = head._modules.get("_orig_mod") or head.forward

        def deferring_forward(*args, **kwargs):
            with _DeferLinear(model, head, owner):
                logits = forward(*args, **kwargs)
            if isinstance(logits, DeferredLogits) and logits.is_outdated:
                return forward(*args, **kwargs)  # a hook has cast or freed the weight since
            return logits

        stack.enter_context(_forward(head, deferring_forward))
        yield


@contextmanager
def _forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within this context, the forward of this one module where this thread calls it."""
    missing = object()
    before = vars(module).get("forward", missing)
    original = module.forward
    thread = None if torch.compiler.is_compiling() else threading.get_ident()

    def forward_of_thread(*args, **kwargs):
        knows_threads = thread is not None and not torch.compiler.is_compiling()  # Dynamo: none
        if knows_threads and threading.get_ident() != thread:
            return original(*args, **kwargs)
        return forward(*args, **kwargs)

    module.forward = forward_of_thread
    try:
        yield
    finally:
        if before is missing:
            del module.forward
        else:
            module.forward = before


def _quantized_layers(head: nn.Module) -> list[nn.Module]:
    """The quantised layers in a head, or the head itself, whose own forward runs (no hook's)."""
    if "bitsandbytes" not in sys.modules:
        return []
    from liger_patch.integrations.bitsandbytes import is_quantized

    return [m for m in head.modules() if is_quantized(m) and "forward" not in vars(m)]


def _quantized_forward(
    layer: nn.Module, model: nn.Module, owner: Owner
) -> Callable[[Tensor], Tensor]:
    from liger_patch.integrations.bitsandbytes import quantized_weight

    forward = layer.forward

    def deferring_forward(x: Tensor) -> Tensor:
        weight = quantized_weight(layer, x.dtype)
        bias: Any = layer.bias
        if weight is None or type(x) is not Tensor or (bias is not None and bias.requires_grad):
            return forward(x)
        if torch.is_autocast_enabled(x.device.type):
            weight.dtype = torch.get_autocast_dtype(x.device.type)
        bias = None if bias is None else bias.to(weight.dtype)
        call = HeadCall.of(x.to(weight.dtype), weight, bias, model, owner, product=forward)
        return DeferredLogits.of_head(call).to(x.dtype)

    return deferring_forward
