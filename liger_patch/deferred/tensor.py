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

A fused loss does not compute the gradient of deferred logits: to ask for it is an error. Hooks that
an engine sets on every output do not need it.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from liger_patch.deferred.ops import METADATA, RECORDED, TAKE_KEYWORDS
from liger_patch.deferred.record import HeadCall, Recordable, Step, real, strides
from liger_patch.kernels.backend import check_backward
from liger_patch.kernels.graphs import runs_eagerly

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
    """Return the (still empty) hooks of these logits. They run on the gradient that reaches the
    node of the logits, from C++ code and other autograd functions.
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
