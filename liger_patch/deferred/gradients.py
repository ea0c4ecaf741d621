"""The gradient of deferred logits, which a fused loss does not compute: to ask for it is an error.
Hooks that an engine sets on every output do not need it.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from liger_patch.deferred.record import Recordable

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
    """Register the hook of an engine on the gradient of deferred logits."""
    if not _is_of(ENGINE_MODULES, hook):
        refuse("register_hook")
    hooks = logits.hooks
    if hooks is None:
        hooks = open_hooks(logits)
        if logits.value is not None:
            attach(hooks, logits.value)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def autograd_grad(outputs: Sequence[Any], inputs: Sequence[Any], **options: Any) -> Any:
    """Compute ``torch.autograd.grad`` of deferred logits: they are read."""
    if any(isinstance(each, Recordable) for each in inputs):
        refuse("autograd.grad")
    outputs = tree_map_only(Recordable, lambda logits: logits.read("autograd.grad"), outputs)
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.grad(outputs, inputs, **options)


def refuse(name: str) -> NoReturn:
    """Raise RuntimeError: the named operation asks for the gradient of deferred logits."""
    raise RuntimeError(
        f"{name} of outputs.logits: they are computed lazily, and a fused loss has no gradient "
        "with respect to them. Set LIGER_PATCH_RETURN_LOGITS=1 for real logits and an ordinary "
        "loss"
    )


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


def _is_of(prefixes: tuple[str, ...], hook: Callable) -> bool:
    """Return whether a hook is defined in a module whose name begins with one of these prefixes."""
    function = getattr(hook, "func", hook)
    inner = None
    if getattr(function, "__module__", None) == "torch.autograd.graph":  # a multi-grad hook
        inner = inspect.getclosurevars(function).nonlocals.get("fn")
    modules = [f"{getattr(each, '__module__', '')}." for each in (function, inner)]
    return any(name.startswith(prefixes) for name in modules)


def prepare_backward(result: Tensor, logits: Recordable) -> None:
    """Before the backward pass of a fused result, which does not pass through the logits, run the
    hooks with which an engine prepares the backward pass of the head.
    """
    node: Any = result.grad_fn
    if node is None:
        return
    for each in ancestry(logits):
        for hook in (each.hooks or {}).values():
            if _is_of(PREPARING_MODULES, hook):
                node.register_prehook(lambda *_, hook=hook: hook(None))
