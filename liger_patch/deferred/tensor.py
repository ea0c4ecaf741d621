"""Deferred logits: a tensor that stands for the logits and computes their values lazily.

``DeferredLogits`` have the shape, dtype and device that the logits would have, and hold the hidden
states and the head. What models do between head and loss is recorded (``ops``); ``fuse`` reads the
record for the fused operators. Any other operation computes the real logits, once, with autograd,
and goes on with them.

A view (a slice, ``detach``) shares the memory of the logits before it, so it sees what is written
to them. All other steps make a copy. Eager would have made that copy at once, before anything was
written to the logits: so its values are computed from the head again.

Reading late gives the logits of the forward pass that made them, or an error: the grad mode and the
autocast state of that forward pass hold, and a head or hidden states that have changed since are
refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from liger_patch.deferred.gradients import (
    ancestry,
    attach,
    autograd_grad,
    is_foreign,
    open_hooks,
    refuse,
    register_hook,
)
from liger_patch.deferred.ops import METADATA, RECORDED, TAKE_KEYWORDS
from liger_patch.deferred.record import HeadCall, Recordable, Step, real, strides
from liger_patch.kernels.backend import check_backward
from liger_patch.kernels.graphs import runs_eagerly

ASKS_FOR_GRADIENT: dict[Any, Callable] = {
    Tensor.register_hook: register_hook,
    Tensor.retain_grad: lambda _: refuse("retain_grad"),
    torch.autograd.grad: autograd_grad,
}


class DeferredLogits(Recordable):
    """The logits (..., V) of one forward pass, computed when their values are first needed."""

    @classmethod
    def of_head(cls, call: HeadCall) -> DeferredLogits:
        rows = call.hidden_states.contiguous()  # the product is contiguous, and views of it follow
        device = call.weight.device
        return cls._make(call, rows, call.dtype, device, call.compute, call.tensors, None, None)

    def then(
        self,
        step: Step,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        into: type[DeferredLogits] | None = None,
    ) -> Tensor:
        """Return these logits after one more operation.

        The operation is recorded. It is computed instead if these logits, or any that they were
        computed from, have been read: then somebody may have written to them.

        Args:
            dtype, device: of the result, where they differ.
            into: the class of the result, where it differs.
        """
        # a detached tensor has no gradient that another autograd function could take part in
        is_settled = self._is_read if step.kind == "detach" else self._is_settled
        if is_settled or (isinstance(step.other, DeferredLogits) and step.other._is_settled):
            others = () if step.other is None else (real(step.other),)
            return step.apply(self.real_logits(), *others)
        rows = step.apply(self.rows) if step.kind == "rows" else self.rows
        if step.kind not in ("rows", "detach"):
            rows = rows.contiguous()  # as the result of an elementwise operation on a slice is
        inputs = (self,) if step.other is None else (self, step.other)
        dtype, device = dtype or self.dtype, device or self.device
        step = step._replace(grad_enabled=torch.is_grad_enabled(), dtype=dtype)
        make = (into or type(self))._make
        return make(self.head_call, rows, dtype, device, step.apply, inputs, self, step)

    @classmethod
    @runs_eagerly  # Dynamo cannot trace _make_wrapper_subclass, and warns of it
    def _make(
        cls,
        call: HeadCall,
        rows: Tensor,
        dtype: torch.dtype,
        device: torch.device,
        compute: Callable[..., Tensor],
        inputs: tuple[Tensor | None, ...],
        parent: DeferredLogits | None,
        step: Step | None,
    ) -> DeferredLogits:
        vocab_size, _ = call.shape

        make = functools.partial(
            Tensor._make_wrapper_subclass,
            cls,
            (*rows.shape[:-1], vocab_size),
            strides=strides(rows, vocab_size),
            dtype=dtype,
            device=device,
        )
        recorded = torch.is_grad_enabled() and not (step is not None and step.kind == "detach")
        # hooks of saved tensors, which offload them, would read logits that are saved
        hooks = nullcontext() if parent is None else no_hooks_of_saved_tensors()
        with torch._C.DisableTorchFunctionSubclass(), torch.set_grad_enabled(recorded), hooks:
            deferred = _Recorded.apply(compute, make, *inputs)
            deferred.recorded_by = deferred.grad_fn
        deferred.head_call, deferred.rows = call, rows
        deferred.parent, deferred.step = parent, step
        deferred.shares_memory = (
            parent is not None
            and step is not None
            and step.kind in ("rows", "detach")
            and rows.untyped_storage()._cdata == parent.rows.untyped_storage()._cdata
        )
        return deferred

    @runs_eagerly
    def real_logits(self) -> Tensor:
        """Return the real logits, computed with autograd at the first call."""
        value = self.value
        if value is None:
            with torch.inference_mode(self.head_call.hidden_states.is_inference()):
                value = _compute(self, lambda parent: parent.real_logits())
        if is_foreign(self):  # also after the first call: of a checkpoint where they were read
            with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
                value = cast(Tensor, _Graft.apply(self, value))
                self.recorded_by = self.grad_fn
            if self.hooks is None:
                open_hooks(self)  # of the node, which the gradient of these values reaches
        self.value = value
        return value

    def result(self, value: Tensor) -> Tensor:
        """Return what a fused operator has computed of these logits, as eager would."""
        return value

    @property
    def _is_settled(self) -> bool:
        """Return whether these logits, or any that they were computed from, have been read (so that
        somebody may have written to them), or were returned by another autograd function.
        """
        return any(node.value is not None or is_foreign(node) for node in ancestry(self))

    @property
    def _is_read(self) -> bool:
        return any(node.value is not None for node in ancestry(self))

    @property
    def is_computed(self) -> bool:
        return self.value is not None

    @property
    def is_outdated(self) -> bool:
        """Return whether the values can no longer be computed."""
        if self.value is not None:
            return False
        calls = [each.head_call for each in ancestry(self) if each.parent is None]
        return any(call.why_outdated() is not None for call in calls)

    def recorded_steps(self) -> list[Step] | None:
        """Return the steps since the head; None where something else has happened to the logits."""
        if self._is_settled:
            return None
        self.head_call.check_unchanged()
        chain: list[Step] = []
        node: Recordable = self
        while node.parent is not None and node.step is not None:
            chain.append(node.step)
            node = node.parent
        return chain[::-1]

    @classmethod
    @runs_eagerly
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in ASKS_FOR_GRADIENT:
            return ASKS_FOR_GRADIENT[func](*args, **kwargs)
        recorded = RECORDED.get(func)
        if recorded is not None and (func in TAKE_KEYWORDS or not kwargs):
            result = recorded(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA and args and args[0].value is None:
                return func(*args, **kwargs)
            # of a property, func is its getter
            name = getattr(getattr(func, "__self__", None), "__name__", func.__name__)
            args, kwargs = tree_map_only(DeferredLogits, lambda d: d.read(name), (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # below autograd, which has been recorded by _Recorded already: values only
        if func is torch.ops.aten.detach.default:
            return args[0]
        args, kwargs = tree_map_only(
            DeferredLogits, lambda d: d.read(str(func)).detach(), (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __hash__(self) -> int:
        return id(self)

    def __reduce_ex__(self, protocol):
        return real(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return real(self).__deepcopy__(memo)


class _Recorded(torch.autograd.Function):
    """The node of deferred logits in the autograd graph.

    Python code that reads deferred logits gets real ones with a graph of their own. C++ code and
    other autograd functions see this node instead: it recomputes the operation and passes the
    gradient on.
    """

    @staticmethod
    def forward(
        ctx, compute: Callable[..., Tensor], make: Callable[[], Tensor], *inputs: Tensor | None
    ) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)  # zeros would be as large as the logits
        return make()

    @staticmethod
    def backward(ctx, grad_output: Tensor | None):
        if grad_output is None:  # DistributedDataParallel runs the node of every output
            return (None,) * len(ctx.needs_input_grad)
        check_backward("outputs.logits", grad_output)
        with torch.enable_grad():
            inputs = [
                None if saved is None else real(saved).detach().requires_grad_(needed)
                for saved, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
            ]
            wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
            gradients = iter(torch.autograd.grad(ctx.compute(*inputs), wanted, real(grad_output)))
        return (
            None,
            None,
            *(None if t is None or not t.requires_grad else next(gradients) for t in inputs),
        )


def no_hooks_of_saved_tensors() -> AbstractContextManager[None]:
    """Return a context within which no hooks see saved tensors: none is offloaded, and checkpoints
    count none.
    """
    autograd = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    if not autograd._saved_tensors_hooks_is_enabled():  # and none may be set
        return nullcontext()
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


class _Graft(torch.autograd.Function):
    """Values in the place of deferred logits that another autograd function has returned."""

    @staticmethod
    def forward(ctx, deferred: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return grad_output, None


def _compute(logits: Recordable, of_view: Callable[[Recordable], Tensor]) -> Tensor:
    """Compute the values.

    Args:
        of_view: computes the values of the logits before the last step, if that step is a view.
    """
    parent, step = logits.parent, logits.step
    if parent is None or step is None:
        result = logits.head_call.logits()
    elif logits.shares_memory:
        with torch.set_grad_enabled(step.grad_enabled):
            result = step.apply(of_view(parent))
    else:
        inputs = [each for each in (parent, step.other) if each is not None]
        values = [_compute_untouched(each) for each in inputs]
        with torch.set_grad_enabled(step.grad_enabled):
            result = step.apply(*values)
    if logits.hooks is not None and result.requires_grad:
        attach(logits.hooks, result)
    return result


def _compute_untouched(logits: Recordable) -> Tensor:
    """Compute the values from the head again, without what has been written to them since."""
    return _compute(logits, _compute_untouched)
