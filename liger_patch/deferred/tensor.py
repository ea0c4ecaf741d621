"""Deferred logits: a tensor that stands for the logits and computes them when somebody looks.

``DeferredLogits`` have the shape, dtype and device that the logits would have, and hold the hidden
states and the head. What models do between the head and the loss is recorded (``steps``); ``parts``
reads the record for a fused loss. Any other operation computes the real logits, once, with
autograd, and goes on with them.

Reading late gives the logits of the forward pass that made them, or an error: the grad mode and the
autocast state of that forward hold, and a head or hidden states that have changed since are
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from liger_patch.deferred.gradients import GradientHooks, autograd_grad, mark
from liger_patch.deferred.head_call import HeadCall, Owner
from liger_patch.deferred.ops import (
    METADATA,
    RECORDED,
    TAKE_KEYWORDS,
    Recordable,
    Step,
)
from liger_patch.kernels.compilation import runs_eagerly
from liger_patch.kernels.differentiation import check_backward

_GRADIENT_OF = cast(Any, Tensor.grad).__get__  # the getter of tensor.grad, a new object each time


class _Record(torch.autograd.Function):
    """Puts deferred logits into the autograd graph.

    Python code that reads deferred logits gets real ones with a graph of their own. C++ code and
    autograd functions of others see this node instead: it recomputes the operation and hands the
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


class _Graft(torch.autograd.Function):
    """Real values in the place of deferred logits that somebody's autograd function returned."""

    @staticmethod
    def forward(ctx, deferred: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return grad_output, None


class DeferredLogits(Recordable):
    """The logits (..., V) of one forward pass, computed when their values are first needed."""

    _head_call: HeadCall
    _rows: Tensor  # (..., H), the hidden states of the rows that were chosen so far
    _parent: DeferredLogits | None
    _step: Step | None
    _recorded_by: Any  # the node that recorded the step; another one is that of somebody's function
    _value: Tensor | None
    _version_computed: int  # of the value when it was computed
    hooks: GradientHooks

    @classmethod
    def of_head(cls, call: HeadCall) -> DeferredLogits:
        rows = call.hidden_states.contiguous()  # as the product is, whose views they stand for
        device = call.weight.device
        return cls._make(call, rows, call.dtype, device, call.compute, call.tensors, None, None)

    def then(
        self,
        step: Step,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """These logits after one more operation.

        It is recorded, or real where somebody has read (and may have written to) these logits or
        those that they stem from.
        """
        if self._is_settled or (isinstance(step.other, DeferredLogits) and step.other._is_settled):
            return step.apply(self.real_logits(), *_real_values(step.other))
        rows = step.apply(self._rows) if step.kind == "rows" else self._rows
        if step.kind not in ("rows", "detach"):
            rows = rows.contiguous()  # as the result of an elementwise operation on a slice is
        inputs = (self,) if step.other is None else (self, step.other)
        dtype, device = dtype or self.dtype, device or self.device
        step = step._replace(grad_enabled=torch.is_grad_enabled(), dtype=dtype)
        return self._make(self._head_call, rows, dtype, device, step.apply, inputs, self, step)

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
        base: DeferredLogits | None,
        step: Step | None,
    ) -> DeferredLogits:
        vocab_size, hidden_size = call.shape

        def make() -> Tensor:
            return Tensor._make_wrapper_subclass(
                cls,
                (*rows.shape[:-1], vocab_size),
                strides=(*(stride // hidden_size * vocab_size for stride in rows.stride()[:-1]), 1),
                dtype=dtype,
                device=device,
            )

        recorded = torch.is_grad_enabled() and not (step is not None and step.kind == "detach")
        # hooks of saved tensors, which offload them, would read logits that are saved
        hooks = nullcontext() if base is None else _no_hooks_of_saved_tensors()
        with torch._C.DisableTorchFunctionSubclass(), torch.set_grad_enabled(recorded), hooks:
            deferred = _Record.apply(compute, make, *inputs)
        deferred._head_call, deferred._rows, deferred._parent, deferred._step = (
            call,
            rows,
            base,
            step,
        )
        deferred.shares_memory = (
            base is not None
            and step is not None
            and step.kind in ("rows", "detach")
            and _share_memory(rows, base._rows)
        )
        deferred._value, deferred.hooks = None, GradientHooks()
        with torch._C.DisableTorchFunctionSubclass():
            deferred._recorded_by = deferred.grad_fn
        return deferred

    @runs_eagerly
    def real_logits(self) -> Tensor:
        """The real logits, computed at the first call."""
        value = self._value
        if value is None:
            with torch.inference_mode(self._head_call.hidden_states.is_inference()):
                value = self._compute(lambda parent: parent.real_logits())
            self._version_computed = 0 if value.is_inference() else value._version
        if self._is_foreign:  # or has become so, by ctx.mark_dirty, since they were computed
            with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
                value = cast(Tensor, _Graft.apply(self, value))
                self._recorded_by = self.grad_fn
        self._value = value
        return value

    @property
    def _is_settled(self) -> bool:
        """Whether these logits, or any that they stem from, have been read (and may have been
        written to) or are somebody's function's.
        """
        node: DeferredLogits | None = self
        while node is not None:
            other = None if node._step is None else node._step.other
            if node._value is not None or node._is_foreign or node._is_hooked:
                return True
            if isinstance(other, DeferredLogits) and other._is_settled:
                return True
            node = node._parent
        return False

    @property
    def _is_foreign(self) -> bool:
        """Whether somebody's autograd function returned these logits: its node is theirs now."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn is not None and self.grad_fn is not self._recorded_by

    @property
    def _is_hooked(self) -> bool:
        return self.hooks.waiting is not None

    @property
    def _gradient_is_wanted(self) -> bool:
        """Whether a hook waits for the gradient of these logits or of any that they stem from, and
        nobody has written to those since.
        """
        nodes = self._ancestry()
        return any(n._is_hooked for n in nodes) and not any(n._is_written for n in nodes)

    @property
    def _is_written(self) -> bool:
        value = self._value
        return (
            value is not None
            and not value.is_inference()
            and value._version != self._version_computed
        )

    def _compute(self, of_view: Callable[[DeferredLogits], Tensor]) -> Tensor:
        parent, step = self._parent, self._step
        if parent is None or step is None:
            logits = self._head_call.logits()
        else:
            # A view shares the memory of its parent. What eager copies was copied before anybody
            # read these logits, let alone wrote to them: it is computed from the head again.
            if self.shares_memory:
                value = of_view(parent)
            elif parent._gradient_is_wanted:
                value = parent.real_logits()
            else:
                value = parent._compute_untouched()
                mark(value, [node.hooks for node in parent._ancestry()])
            with torch.set_grad_enabled(step.grad_enabled):
                if isinstance(step.other, DeferredLogits):
                    logits = step.apply(value, step.other._compute_untouched())
                else:
                    logits = step.apply(value)
        if not self.hooks.are_none:
            self.hooks.attach(logits)
        return logits

    def _ancestry(self) -> list[DeferredLogits]:
        """These logits and all that they stem from."""
        nodes: list[DeferredLogits] = [self]
        for node in nodes:  # which grows
            others = (node._parent, None if node._step is None else node._step.other)
            nodes += [other for other in others if isinstance(other, DeferredLogits)]
        return nodes

    def leave_gradient_out(self, result: Tensor) -> None:
        """Make a fused result's backward pass an error where a hook waits for the gradient of these
        logits, or of any that they stem from.
        """
        mark(result, [node.hooks for node in self._ancestry()])

    def _compute_untouched(self) -> Tensor:
        return self._compute(DeferredLogits._compute_untouched)

    def recorded_steps(self) -> list[Step] | None:
        """The steps from the head on; None where they are not all that has happened."""
        if self._is_settled:
            return None
        self._head_call.check_unchanged()
        chain: list[Step] = []
        node = self
        while node._parent is not None and node._step is not None:
            chain.append(node._step)
            node = node._parent
        return chain[::-1]

    @property
    def head_call(self) -> HeadCall:
        return self._head_call

    @property
    def chosen_rows(self) -> Tensor:
        """(..., H): the hidden states of the rows that were chosen so far."""
        return self._rows

    @property
    def value(self) -> Tensor | None:
        return self._value

    def read(self, name: str) -> Tensor:
        if self._value is None:
            self.owner.note_read(name)
        return self.real_logits()

    @property
    def is_computed(self) -> bool:
        return self._value is not None

    @property
    def is_outdated(self) -> bool:
        """Whether it is too late to compute them."""
        if self._value is not None:
            return False
        if self._head_call.changed() is not None or self._head_call.freed():
            return True
        node = self
        while node._parent is not None and node._step is not None:
            if isinstance(node._step.other, DeferredLogits) and node._step.other.is_outdated:
                return True
            node = node._parent
        return False

    @property
    def owner(self) -> Owner:
        return self._head_call.owner

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (Tensor.register_hook, Tensor.retain_grad):
            return args[0]._register_hook(func.__name__, *(args[1:] or (None,)), **kwargs)
        if func == _GRADIENT_OF and args[0].hooks.retained is not None:
            return args[0].hooks.retained
        if func is torch.autograd.grad:
            return autograd_grad(*args, **kwargs)
        recorded = RECORDED.get(func)
        if recorded is not None and (func in TAKE_KEYWORDS or not kwargs):
            result = recorded(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA and args and not args[0].is_computed:
                return func(*args, **kwargs)
            # of a property, func is its getter
            name = getattr(getattr(func, "__self__", None), "__name__", func.__name__)
            own = args[0] if args else None
            args, kwargs = tree_map_only(DeferredLogits, lambda d: d.read(name), (args, kwargs))
            result = func(*args, **kwargs)
            # an operation in place returns its own argument; not on a view, whose base does not
            # learn of an autograd function that says so by ctx.mark_dirty: an error there
            if isinstance(own, DeferredLogits) and result is args[0] and not own.shares_memory:
                return own
            return result

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # below autograd, which has been recorded by _Record already: values only
        if func is torch.ops.aten.detach.default:
            return args[0]
        args, kwargs = tree_map_only(
            DeferredLogits, lambda d: d.read(str(func)).detach(), (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def _register_hook(self, name: str, hook: Callable | None) -> RemovableHandle | None:
        """Register a hook on the gradient of these logits; None to retain it."""
        if self.hooks.are_none:
            with torch._C.DisableTorchFunctionSubclass():
                if not self.requires_grad:
                    raise RuntimeError(f"{name} of logits that require no gradient")
                self.hooks.attach(self)
            if self._value is not None:
                self.hooks.attach(self._value)
        handle = self.hooks.retain() if hook is None else self.hooks.register(hook, name)
        if self._is_hooked:
            self.owner.note_read(name)
        return handle

    def __hash__(self) -> int:
        return id(self)

    def __reduce_ex__(self, protocol):
        return real(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return real(self).__deepcopy__(memo)


def _no_hooks_of_saved_tensors() -> AbstractContextManager[None]:
    autograd = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    if not autograd._saved_tensors_hooks_is_enabled():  # and none may be set
        return nullcontext()
    return saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _real_values(other: Tensor | None) -> tuple[Tensor, ...]:
    return () if other is None else (real(other),)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def real(tensor: Tensor) -> Tensor:
    """The tensor itself, or the real logits that it defers."""
    return tensor.real_logits() if isinstance(tensor, DeferredLogits) else tensor
