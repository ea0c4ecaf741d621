"""The gradient of deferred logits: hooks on it, and ``torch.autograd.grad`` with respect to them.

The backward pass of a fused loss does not compute this gradient. The backward pass of a loss that
was computed from real logits does.
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
LEFT_OUT = "liger_patch: hooks of logits whose gradient is left out"  # of an autograd node


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
        others = (node.parent, None if node.step is None else node.step.other)
        waiting += [other for other in others if other is not None]
    return nodes


class GradientHooks:
    """The hooks on the gradient of some deferred logits, and of their values once computed.

    Attributes:
        preparing: hooks with which an engine gathers weights before the backward pass of the head.
        retained: the sum of the gradients so far, where ``retain_grad`` has asked for it.
    """

    def __init__(self) -> None:
        self._hooks: OrderedDict[int, Callable] = OrderedDict()
        self._of_users: dict[int, str] = {}  # id of a user's hook -> the operation that set it
        self.preparing: list[Callable] = []
        self.retained: Tensor | None = None

    @property
    def waiting(self) -> str | None:
        """Return the operation that set a hook of the user, who wants the gradient; or None."""
        return next((name for key, name in self._of_users.items() if key in self._hooks), None)

    @property
    def are_none(self) -> bool:
        """Return whether there is no hook, of a user or of an engine."""
        return not self._hooks

    def register(self, hook: Callable, operation: str) -> RemovableHandle:
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        if not _is_of(ENGINE_MODULES, hook):
            self._of_users[handle.id] = operation
        elif _is_of(PREPARING_MODULES, hook):
            self.preparing.append(hook)
        return handle

    def retain(self) -> None:
        """Sum the gradients up, as ``retain_grad`` does."""
        self.register(partial(_sum_up, self), "retain_grad")

    def attach(self, tensor: Tensor) -> None:
        """Run the hooks on the gradient of this tensor."""
        if tensor.requires_grad:
            tensor.register_hook(partial(_run, self._hooks))

    def check_none_waits(self, *gradients: Any) -> None:
        """Raise RuntimeError in a backward pass that does not compute what a hook waits for."""
        # (None,): the loss has no part in this backward pass
        if self.waiting is not None and gradients != (None,):
            raise RuntimeError(f"{self.waiting} of outputs.logits: {NO_GRADIENT}")


def _run(hooks: OrderedDict[int, Callable], gradient: Tensor) -> Tensor:
    for hook in list(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _sum_up(hooks: GradientHooks, gradient: Tensor) -> None:
    before = hooks.retained
    hooks.retained = gradient.clone() if before is None else before + gradient


def _is_of(prefixes: tuple[str, ...], hook: Callable) -> bool:
    """Return whether a hook is defined in a module whose name begins with one of these prefixes."""
    function = getattr(hook, "func", hook)
    inner = None
    if getattr(function, "__module__", None) == "torch.autograd.graph":  # a multi-grad hook
        inner = inspect.getclosurevars(function).nonlocals.get("fn")
    modules = [f"{getattr(each, '__module__', '')}." for each in (function, inner)]
    return any(name.startswith(prefixes) for name in modules)


def register_hook(logits: Recordable, name: str, hook: Callable | None) -> RemovableHandle | None:
    """Register a hook on the gradient of deferred logits; None to retain it."""
    hooks: GradientHooks = logits.hooks
    if hooks.are_none:
        with torch._C.DisableTorchFunctionSubclass():
            if not logits.requires_grad:
                raise RuntimeError(
                    f"{name} of outputs.logits, which require no gradient: run the forward pass "
                    "with gradients enabled, and train a weight"
                )
            hooks.attach(logits)
        if logits.value is not None:
            hooks.attach(logits.value)
    handle = hooks.retain() if hook is None else hooks.register(hook, name)
    if hooks.waiting is not None:
        logits.head_call.owner.note_read(name)
    return handle


def leave_gradient_out(result: Tensor, logits: Recordable) -> None:
    """Mark a result whose backward pass does not compute the gradient of the logits.

    Its backward pass is an error where a hook waits for the gradient of the logits, or of any that
    they were computed from. So is ``autograd.grad`` with respect to those.
    """
    node: Any = result.grad_fn
    if node is None:
        return
    hooks = [each.hooks for each in ancestry(logits)]
    node.metadata[LEFT_OUT] = node.metadata.get(LEFT_OUT, ()) + tuple(hooks)
    for each in hooks:
        node.register_prehook(each.check_none_waits)


def prepare_backward(result: Tensor, logits: Recordable) -> None:
    """Run the hooks with which an engine prepares the backward pass of the head before that of a
    result, which computes the gradients of hidden states and weight instead.
    """
    node: Any = result.grad_fn
    if node is None:
        return
    for hook in (hook for each in ancestry(logits) for hook in each.hooks.preparing):
        node.register_prehook(partial(_run_without_gradient, hook))


def _run_without_gradient(hook: Callable, *_: Any) -> None:
    hook(None)


def gradient_is_wanted(logits: Recordable) -> bool:
    """Return whether a hook waits for the gradient of these logits, or of any that they were
    computed from, and none of those has been written to since.
    """
    nodes = ancestry(logits)
    is_hooked = any(node.hooks.waiting is not None for node in nodes)
    return is_hooked and not any(_is_written(node) for node in nodes)


def _is_written(logits: Recordable) -> bool:
    value = logits.value
    if value is None or value.is_inference():
        return False
    return value._version != logits.version_computed


def autograd_grad(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    *,
    allow_unused: bool | None = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Compute ``torch.autograd.grad`` with deferred logits among its arguments.

    Raises:
        RuntimeError: a part of the outputs has no gradient with respect to the logits: a fused
            loss, or what was computed from copies of them before they were read.
    """
    outputs = tree_map_only(Recordable, lambda logits: logits.read("autograd.grad"), outputs)
    left_out = _left_out_of(outputs)
    if any(isinstance(each, Recordable) and each.hooks in left_out for each in inputs):
        raise RuntimeError(f"autograd.grad with respect to outputs.logits: {NO_GRADIENT}")
    # the graph of what was computed from logits that were read begins at their values
    sources = [
        each.value if isinstance(each, Recordable) and each.value is not None else each
        for each in inputs
    ]
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.grad(outputs, sources, allow_unused=allow_unused, **options)


def _left_out_of(outputs: Sequence[Any]) -> list[GradientHooks]:
    """Return the hooks of logits whose gradient is left out in the graph of these tensors."""
    nodes = [getattr(each, "grad_fn", None) for each in outputs]
    seen, found = set(), []
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found += node.metadata.get(LEFT_OUT, ())
            nodes += [parent for parent, _ in node.next_functions]
    return found
