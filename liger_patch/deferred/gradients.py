"""The gradient of deferred logits: hooks on it, and ``torch.autograd.grad`` with respect to them.

Whoever asks for it reads the logits: the gradient passes through their values, and a loss that
comes later is not fused. Hooks that an engine sets on every output do not need it and read nothing.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from liger_patch.deferred.record import Recordable

NO_GRADIENT = (
    "a fused loss, and values copied before this call, have no gradient with respect to them. "
    "Ask for it before their first use, or set LIGER_PATCH_RETURN_LOGITS=1 for real logits and an "
    "ordinary loss"
)
# modules of engines whose hooks, set on every output, do not need the gradient itself
ENGINE_MODULES = (
    "torch.distributed.",
    "torch.utils.module_tracker.",
    "deepspeed.",
)
# those of them whose hooks prepare a unit for its backward pass, and must run before it
PREPARING_MODULES = ("torch.distributed.fsdp.",)


def is_foreign(logits: Recordable) -> bool:
    """Return whether another autograd function has returned these logits, so that their
    ``grad_fn`` is no longer the node that recorded them.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return logits.grad_fn is not None and logits.grad_fn is not logits.recorded_by


def ancestry(logits: Recordable) -> list[Recordable]:
    """Return these logits and all that they were computed from."""
    nodes, waiting = [], [logits]
    while waiting:  # no loop over a list that grows: Dynamo of older versions walks a copy
        node = waiting.pop()
        nodes.append(node)
        if node.parent is not None:
            waiting.append(node.parent)
        if node.step is not None and node.step.other is not None:
            waiting.append(node.step.other)
    return nodes


def register_hook(logits: Recordable, hook: Callable) -> RemovableHandle:
    """Register a hook on the gradient of deferred logits. They are read, but for an engine."""
    if _is_of(ENGINE_MODULES, hook):
        return _register(logits, hook)
    return _register_and_read(logits, "register_hook", hook)


def retain_grad(logits: Recordable) -> None:
    """Read deferred logits, and sum their gradients up from now on."""
    if logits.retained is None:
        retained: list[Tensor] = []
        _register_and_read(logits, "retain_grad", partial(_sum_up, retained))
        logits.retained = retained


def _register_and_read(logits: Recordable, name: str, hook: Callable) -> RemovableHandle:
    _check_not_left_out(logits, name)
    handle = _register(logits, hook)
    logits.gradient_asked = name
    logits.read(name)
    return handle


def _register(logits: Recordable, hook: Callable) -> RemovableHandle:
    hooks = logits.hooks
    if hooks is None:
        hooks = open_hooks(logits)
        if logits.value is not None:
            attach(hooks, logits.value)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def open_hooks(logits: Recordable) -> OrderedDict[int, Callable]:
    """Return these logits' hooks, of which there is none yet: they run on the gradient that reaches
    the node of the logits, that of functions which do not see the values.
    """
    hooks: OrderedDict[int, Callable] = OrderedDict()
    with torch._C.DisableTorchFunctionSubclass():
        attach(hooks, logits)
    logits.hooks = hooks
    return hooks


def attach(hooks: OrderedDict[int, Callable], tensor: Tensor) -> None:
    """Run these hooks on the gradient of this tensor."""
    tensor.register_hook(partial(_run, hooks))


def _run(hooks: OrderedDict[int, Callable], gradient: Tensor) -> Tensor:
    for hook in list(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _sum_up(retained: list[Tensor], gradient: Tensor) -> None:
    retained[:] = [retained[0] + gradient if retained else gradient.clone()]


def _is_of(prefixes: tuple[str, ...], hook: Callable) -> bool:
    """Return whether a hook is defined in a module whose name begins with one of these prefixes."""
    function = getattr(hook, "func", hook)
    inner = None
    if getattr(function, "__module__", None) == "torch.autograd.graph":  # a multi-grad hook
        inner = inspect.getclosurevars(function).nonlocals.get("fn")
    modules = [f"{getattr(each, '__module__', '')}." for each in (function, inner)]
    return any(name.startswith(prefixes) for name in modules)


def leave_gradient_out(logits: Recordable) -> None:
    """Note that the gradient of something does not pass through these logits, nor through those
    that they were computed from.

    Raises:
        RuntimeError: it was asked for.
    """
    for each in ancestry(logits):
        if each.gradient_asked is not None:
            raise RuntimeError(
                f"a copy of outputs.logits that was made before {each.gradient_asked} has no part "
                "in their gradient: read the copy first or make it later, or set "
                "LIGER_PATCH_RETURN_LOGITS=1 for real logits"
            )
        each.gradient_left_out = True


def prepare_backward(result: Tensor, logits: Recordable) -> None:
    """Prepare the backward pass of a fused result, which computes the gradients of hidden states
    and weight and not that of the logits: before it, run the hooks with which an engine prepares
    the backward pass of the head.
    """
    node: Any = result.grad_fn
    if node is None:
        return
    leave_gradient_out(logits)
    for each in ancestry(logits):
        for hook in (each.hooks or {}).values():
            if _is_of(PREPARING_MODULES, hook):
                node.register_prehook(partial(_run_without_gradient, hook))


def _run_without_gradient(hook: Callable, *_: Any) -> None:
    hook(None)


def _check_not_left_out(logits: Recordable, name: str) -> None:
    if logits.gradient_left_out:
        raise RuntimeError(f"{name} of outputs.logits: {NO_GRADIENT}")


def autograd_grad(outputs: Sequence[Any], inputs: Sequence[Any], **options: Any) -> Any:
    """Compute ``torch.autograd.grad`` with deferred logits among its arguments: they are read.

    Raises:
        RuntimeError: a fused loss, or a copy of the logits, was computed without their gradient.
    """
    outputs = tree_map_only(Recordable, _read_for_grad, outputs)  # which may leave gradients out
    for each in inputs:
        if isinstance(each, Recordable):
            _check_not_left_out(each, "autograd.grad")
    inputs = tree_map_only(Recordable, _read_for_grad, inputs)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.grad(outputs, inputs, **options)


def _read_for_grad(logits: Recordable) -> Tensor:
    return logits.read("autograd.grad")
