"""Logits that leave a graph of ``torch.compile``.

Within the graph they are a placeholder (``traced``). Where a placeholder leaves the graph,
``DeferredLogits`` are made for it, and every later call on the placeholder goes to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from liger_patch.deferred.gradients import ancestry
from liger_patch.deferred.record import Recordable, Step
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.kernels.graphs import runs_eagerly


class Leaving(Protocol):
    """A product of the head within a graph."""

    def outside(self) -> DeferredLogits:
        """Return deferred logits of the same product outside of graphs."""
        ...


class LeavesGraph:
    """An attribute of a placeholder that notices when the placeholder leaves a graph.

    torch.compile then sets the attributes of all placeholders again, in no certain order. Within a
    graph this is an ordinary attribute.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @runs_eagerly
    def __set__(self, logits: PlaceholderLogits, value: Any) -> None:
        vars(logits)[self.name] = value
        _leave_graph(logits)


class PlaceholderLogits(Recordable):
    """The logits (..., V) of a graph, within it and outside.

    Attributes:
        origin: (product of the head, None, None) for the head's own logits; (None, placeholder
            before the last step, that step) for all others.
        form: a plain tensor of the same shape, dtype and device.
        value: the real logits if the graph has computed them.
        deferred: the deferred logits that stand for this placeholder outside of graphs.
        waiting: the placeholders that wait until this one has its ``deferred``.
    """

    origin: Any = LeavesGraph()  # (Leaving | None, PlaceholderLogits | None, Step | None)
    value: Any = LeavesGraph()
    form: Tensor
    deferred: DeferredLogits
    waiting: list[PlaceholderLogits]


def _leave_graph(logits: PlaceholderLogits) -> None:
    """Make the deferred logits of a placeholder that has left a graph. If a placeholder that it was
    computed from has none yet, wait for that one.
    """
    known = vars(logits)
    if "origin" not in known:
        return
    if "deferred" not in known:
        call, parent, step = known["origin"]
        needed = [] if parent is None else [parent, *([] if step.other is None else [step.other])]
        missing = [each for each in needed if "deferred" not in vars(each)]
        if missing:
            vars(missing[0]).setdefault("waiting", []).append(logits)
            return
        known["deferred"] = call.outside() if parent is None else _after_step(parent, step)
        known["deferred"].placeholder = weakref.ref(logits)
        _refuse_gradient(logits)
    value = known.get("value")
    if value is not None:
        deferred = known["deferred"]
        deferred.value, deferred.version_computed = value, value._version
    for each in known.pop("waiting", ()):
        _leave_graph(each)


def _refuse_gradient(logits: PlaceholderLogits) -> None:
    """Make the backward pass an error for code that goes past ``__torch_function__``."""
    if logits.deferred.requires_grad:
        with torch._C.DisableTorchFunctionSubclass():
            logits.requires_grad_()
            logits.register_hook(_raise_unless_none)


def _raise_unless_none(gradient: Tensor | None) -> None:
    if gradient is not None:
        raise RuntimeError(
            "outputs.logits of a compiled call were given to an autograd function, which has no "
            "gradient with respect to them: give it outputs.logits.clone(), or set "
            "LIGER_PATCH_RETURN_LOGITS=1"
        )


def _after_step(parent: PlaceholderLogits, step: Step) -> DeferredLogits:
    """Return the parent's deferred logits after a step.

    The step was recorded before any of these logits were read in the graph, so their values are
    hidden while it is applied.
    """
    if step.other is not None:
        step = step._replace(other=cast(PlaceholderLogits, step.other).deferred)
    read = [(each, each.value) for each in ancestry(parent.deferred)]
    for each, _ in read:
        each.value = None
    with torch.set_grad_enabled(step.grad_enabled):
        deferred = parent.deferred.then(step, dtype=step.dtype)
    for each, value in read:
        each.value = value
    return cast(DeferredLogits, deferred)


@runs_eagerly
def call_outside(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a torch function outside of graphs."""
    if func in (Tensor.register_hook, Tensor.retain_grad):
        _watch_loss(args[0])
    args, kwargs = tree_map_only(PlaceholderLogits, lambda logits: logits.deferred, (args, kwargs))
    return func(*args, **kwargs)


def _watch_loss(logits: PlaceholderLogits) -> None:
    """Make the backward pass of the graph's loss an error where a hook waits for the gradient of
    these logits. Its node is the whole graph's, so it is the loss itself that has a hook.
    """
    hooks, loss = logits.deferred.hooks, logits.deferred.head_call.owner.loss_of_graph
    if loss is not None and loss.requires_grad and hooks.are_none:
        loss.register_hook(hooks.check_none_waits)
