"""Deferred logits within a graph of ``torch.compile``, which makes no tensor of its own class.

There the logits are a placeholder: one nan, expanded to their shape, of a class whose
``__torch_function__`` is traced. It records the steps that ``DeferredLogits`` record. Any other
operation computes the values as a part of the graph. A placeholder that the graph does not return
costs nothing in the compiled graph. For a placeholder that it does return, see ``left_graph``.
"""

# pyright: reportIncompatibleVariableOverride=false
# (properties for attributes: each attribute of a placeholder would leave the graph)
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils._pytree import tree_map_only

from liger_patch.deferred.gradients import ancestry
from liger_patch.deferred.head_call import Head, HeadCall, Owner
from liger_patch.deferred.left_graph import PlaceholderLogits, call_outside
from liger_patch.deferred.ops import METADATA, RECORDED, TAKE_KEYWORDS
from liger_patch.deferred.record import Step, strides
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.kernels.backend import autocast_dtype, autocast_to
from liger_patch.kernels.graphs import inlined_only

TRACES_LOGITS = torch.__version__ >= "2.11"  # before, Dynamo cannot make such a placeholder
_NEED_GRADIENTS = frozenset(
    getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf", "_base")
)  # a placeholder has none


class TracedCall(NamedTuple):
    """One product of the head within a graph: the counterpart of ``Head`` and ``HeadCall``."""

    hidden_states: Tensor  # (..., H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    model: nn.Module
    module: nn.Module
    owner: Owner
    dtype: torch.dtype  # of the logits
    autocast_dtype: torch.dtype | None
    grad_enabled: bool

    def logits(self) -> Tensor:
        """Compute the real logits, in the grad mode and the autocast state of the call."""
        with torch.set_grad_enabled(self.grad_enabled), self._autocast():
            return nn.functional.linear(self.hidden_states, self.weight, self.bias)

    def outside(self) -> DeferredLogits:
        """Return deferred logits of the same product outside of graphs."""
        head = Head(self.model, self.module, self.owner)
        with torch.set_grad_enabled(self.grad_enabled), self._autocast():
            call = HeadCall.of(self.hidden_states, self.weight, self.bias, head)
            return DeferredLogits.of_head(call)

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast_to(self.weight.device.type, self.autocast_dtype)


class TracedLogits(PlaceholderLogits):
    """The logits (..., V) within a graph, with the methods of ``DeferredLogits``."""

    @classmethod
    def of_product(
        cls, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, head: Head
    ) -> TracedLogits:
        device, autocast = weight.device, autocast_dtype(weight.device.type)
        dtype = hidden_states.dtype if autocast is None else autocast
        named = head.model, head.module, head.owner
        grad_enabled = torch.is_grad_enabled()
        call = TracedCall(hidden_states, weight, bias, *named, dtype, autocast, grad_enabled)
        shape = (*hidden_states.shape[:-1], len(weight))
        return _placeholder(shape, dtype, device, (call, None, None))

    def then(
        self,
        step: Step,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """Return these logits after one more operation: recorded, or computed where these logits,
        or any that they were computed from, have been read, and may have been written to.
        """
        if self._is_read or (step.other is not None and cast(TracedLogits, step.other)._is_read):
            others = () if step.other is None else (step.other.real_logits(),)
            return step.apply(self.real_logits(), *others)
        dtype, device = dtype or self.dtype, device or self.device
        kind, function, arguments, factor, other, is_view, *_ = step
        # anew: torch.compile cannot rebuild what _replace makes (torch 2.11)
        recorded = is_view, torch.is_grad_enabled(), dtype
        step = Step(kind, function, arguments, factor, other, *recorded)
        shape = self.shape
        if step.kind == "rows":
            shape = (*step.apply(self.rows).shape[:-1], shape[-1])
        return _placeholder(shape, dtype, device, (None, self, step))

    @property
    def parent(self) -> TracedLogits | None:
        return self.origin[1]

    @property
    def step(self) -> Step | None:
        return self.origin[2]

    @property
    def head_call(self) -> TracedCall:
        call, parent, _ = self.origin
        return call if parent is None else parent.head_call

    @property
    def rows(self) -> Tensor:
        """(..., H), laid out as these logits would be."""
        call, parent, step = self.origin
        if parent is None:
            return call.hidden_states.contiguous()
        if step.kind == "rows":
            return step.apply(parent.rows)
        return parent.rows if step.kind == "detach" else parent.rows.contiguous()

    @property
    def is_computed(self) -> bool:
        return self.value is not None

    @property
    def _is_read(self) -> bool:
        return any(cast(TracedLogits, node).is_computed for node in ancestry(self))

    @property
    def shares_memory(self) -> bool:
        """Return whether eager's result of the last step would share its input's memory."""
        parent, step = self.parent, self.step
        if parent is None or step is None or step.kind not in ("rows", "detach"):
            return False
        if step.is_view is not None:
            return step.is_view
        return parent.rows.is_contiguous() or not self.rows.is_contiguous()

    @property
    def wants_gradient(self) -> bool:
        call, step = self.head_call, self.step
        if step is not None and (step.kind == "detach" or not step.grad_enabled):
            return False
        if self.parent is not None:
            other = None if step is None else cast("TracedLogits | None", step.other)
            return self.parent.wants_gradient or (other is not None and other.wants_gradient)
        tensors = (call.hidden_states, call.weight, call.bias)
        return call.grad_enabled and any(t is not None and t.requires_grad for t in tensors)

    def recorded_steps(self) -> list[Step] | None:
        """Return the steps since the head; None where something else has happened to the logits."""
        if self.is_computed:
            return None
        if self.parent is None:
            return []
        before = self.parent.recorded_steps()
        return None if before is None or self.step is None else [*before, self.step]

    def real_logits(self) -> Tensor:
        """Return the real logits, computed at the first call."""
        if not torch.compiler.is_dynamo_compiling():
            return self.deferred.real_logits()
        if self.value is None:
            self.value = _compute(self, TracedLogits.real_logits)
        return self.value

    def result(self, value: Tensor) -> Tensor:
        """Return what a fused operator has computed of these logits, as eager would."""
        return value

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not torch.compiler.is_dynamo_compiling():
            if TracingContext.try_get() is not None:  # torch.compile looks at an input of a graph
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            return call_outside(func, args, kwargs)
        recorded = RECORDED.get(func)
        if recorded is not None and (func in TAKE_KEYWORDS or not kwargs):
            result = recorded(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in METADATA and func not in _NEED_GRADIENTS and not args[0].is_computed:
            logits, *others = args
            if func is Tensor.stride:
                return _stride(logits, *others, **kwargs)
            form = logits.rows if func is Tensor.is_contiguous else logits.form
            return func(form, *others, **kwargs)
        args, kwargs = tree_map_only(
            TracedLogits, lambda logits: logits.read("torch.compile"), (args, kwargs)
        )
        return func(*args, **kwargs)


# torch.compile would compile calls between two graphs as if they were within one
inlined_only(TracedLogits.__torch_function__.__func__)


def _placeholder(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, origin: tuple
) -> TracedLogits:
    # nan: an operation that goes past __torch_function__ must not get a number that looks right.
    # Dynamo does so for nn.CrossEntropyLoss(...) made within a graph, and for F.tanh and F.sigmoid
    form = torch.full((), float("nan"), dtype=dtype, device=device).expand(shape)
    logits = form.as_subclass(TracedLogits)
    logits.form, logits.value = form, None
    logits.origin = origin
    return logits


def _stride(logits: TracedLogits, dim: int | None = None) -> Any:
    found = strides(logits.rows, logits.shape[-1])
    return found if dim is None else found[dim]


def _compute(logits: TracedLogits, of_view: Callable[[TracedLogits], Tensor]) -> Tensor:
    """Compute the values within the graph; ``of_view``: those of the logits whose memory they
    share. See ``materialize``.
    """
    parent, step = logits.parent, logits.step
    if parent is None or step is None:
        return logits.head_call.logits()
    before = of_view(parent) if logits.shares_memory else _compute_untouched(parent)
    others = () if step.other is None else (_compute_untouched(cast(TracedLogits, step.other)),)
    with torch.set_grad_enabled(step.grad_enabled):
        return step.apply(before, *others)


def _compute_untouched(logits: TracedLogits) -> Tensor:
    return _compute(logits, _compute_untouched)
