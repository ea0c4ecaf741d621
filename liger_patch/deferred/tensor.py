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

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from liger_patch.deferred.head_call import HeadCall, Owner
from liger_patch.deferred.ops import (
    METADATA,
    NEED_A_GRADIENT,
    RECORDED,
    TAKE_KEYWORDS,
    Recordable,
    Step,
)
from liger_patch.kernels.compilation import runs_eagerly
from liger_patch.kernels.differentiation import check_backward

NO_GRADIENT = (
    "the fused loss has no gradient with respect to them. Set LIGER_PATCH_RETURN_LOGITS=1 for real "
    "logits and an ordinary loss"
)


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
            return (None, None, *(None for _ in ctx.saved_tensors))
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
    _hooks: OrderedDict[int, Callable] | None  # of engines, on the gradient of these logits

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
        deferred._value = deferred._hooks = None
        with torch._C.DisableTorchFunctionSubclass():
            deferred._recorded_by = deferred.grad_fn
        return deferred

    def real_logits(self) -> Tensor:
        """The real logits, computed at the first call."""
        value = self._value
        if value is None:
            with torch.inference_mode(self._head_call.hidden_states.is_inference()):
                value = self._compute(lambda parent: parent.real_logits())
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
            if node._value is not None or node._is_foreign:
                return True
            if isinstance(other, DeferredLogits) and other._is_settled:
                return True
            node = node._parent
        return False

    @property
    def _is_foreign(self) -> bool:
        """Whether somebody's autograd function returned these logits: its node is theirs now."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn is not self._recorded_by

    def _compute(self, of_view: Callable[[DeferredLogits], Tensor]) -> Tensor:
        parent, step = self._parent, self._step
        if parent is None or step is None:
            logits = self._head_call.logits()
        else:
            # A view shares the memory of its parent. What eager copies was copied before anybody
            # read these logits, let alone wrote to them: it is computed from the head again.
            value = of_view(parent) if self.shares_memory else parent._compute_untouched()
            with torch.set_grad_enabled(step.grad_enabled):
                if isinstance(step.other, DeferredLogits):
                    logits = step.apply(value, step.other._compute_untouched())
                else:
                    logits = step.apply(value)
        if self._hooks is not None and logits.requires_grad:
            logits.register_hook(partial(_run_hooks, self._hooks))
        return logits

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
        if func is Tensor.register_hook and _is_of_engine(*args[1:]):
            return args[0]._register_engine_hook(args[1])
        if func is torch.autograd.grad:
            return _gradient(*args, **kwargs)
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
            if func in NEED_A_GRADIENT:
                args[0].owner.note_gradient_wanted(name)
            own = args[0] if args else None
            args, kwargs = tree_map_only(DeferredLogits, lambda d: _read(d, name), (args, kwargs))
            result = func(*args, **kwargs)
            # an operation in place returns its own argument
            return own if args and result is args[0] else result

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # below autograd, which has been recorded by _Record already: values only
        if func is torch.ops.aten.detach.default:
            return args[0]
        args, kwargs = tree_map_only(
            DeferredLogits, lambda d: _read(d, str(func)).detach(), (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def _register_engine_hook(self, hook: Callable) -> RemovableHandle:
        """Register a hook that waits for the backward pass: on this node, and on real logits."""
        if self._hooks is None:
            self._hooks = OrderedDict()
            if self._value is not None and self._value.requires_grad:
                self._value.register_hook(partial(_run_hooks, self._hooks))
            with torch._C.DisableTorchFunctionSubclass():
                Tensor.register_hook(self, partial(_run_hooks, self._hooks))
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
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


def _run_hooks(hooks: OrderedDict[int, Callable], gradient: Tensor | None) -> Tensor | None:
    for hook in list(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _gradient(
    outputs: Any,
    inputs: Sequence[Any],
    *,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad`` with deferred logits among its arguments."""
    outputs = tree_map_only(DeferredLogits, lambda d: _read(d, "grad"), outputs)
    # what was computed of the logits has the values where they were read, else their node
    sources = [
        each._value if isinstance(each, DeferredLogits) and each._value is not None else each
        for each in inputs
    ]
    allow_unused = materialize_grads if allow_unused is None else allow_unused
    allowed = allow_unused or any(isinstance(each, DeferredLogits) for each in inputs)
    with torch._C.DisableTorchFunctionSubclass():
        gradients = list(torch.autograd.grad(outputs, sources, allow_unused=allowed, **options))
    for i, (source, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        if gradient is not None:
            continue
        if isinstance(source, DeferredLogits):
            raise RuntimeError(f"autograd.grad with respect to outputs.logits: {NO_GRADIENT}")
        if materialize_grads:
            gradients[i] = torch.zeros_like(source)
        elif not allow_unused:
            raise RuntimeError(
                f"inputs[{i}] of autograd.grad was not used in the graph: set allow_unused=True "
                "if that is intended"
            )
    return tuple(gradients)


def _real_values(other: Tensor | None) -> tuple[Tensor, ...]:
    return () if other is None else (real(other),)


def _read(deferred: DeferredLogits, name: str) -> Tensor:
    if deferred._value is None:
        deferred.owner.note_read(name)
    return deferred.real_logits()


ENGINES = ("torch.distributed", "torch.utils.module_tracker", "deepspeed")


def _is_of_engine(hook: Any = None) -> bool:
    """Return True for a hook that an engine sets on every output and that the loss's gradient will
    do for: those of FSDP and DeepSpeed, and of the module tracker of FlopCounterMode.
    """
    function = getattr(hook, "func", hook)
    inner = None
    if getattr(function, "__module__", None) == "torch.autograd.graph":  # a multi-grad hook
        inner = inspect.getclosurevars(function).nonlocals.get("fn")
    modules = [str(getattr(each, "__module__", "")) for each in (function, inner)]
    return any(name.startswith(ENGINES) for name in modules)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def real(tensor: Tensor) -> Tensor:
    """The tensor itself, or the real logits that it defers."""
    return tensor.real_logits() if isinstance(tensor, DeferredLogits) else tensor
