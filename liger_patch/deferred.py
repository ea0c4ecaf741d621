"""Deferred logits: a tensor that stands for the logits and computes them when somebody looks.

While a patched model's forward runs, ``deferring_head`` makes the output embedding's own ``linear``
call return ``DeferredLogits`` instead of multiplying: a tensor with the shape, dtype and device
that the logits would have, which holds the hidden states and the head. What models do between the
head and the loss is recorded: multiplication and division by a number, ``tanh``, casts, and the
choice of rows (slices, masks, ``view``). ``parts`` hands the record to a fused loss. Any other
operation computes the real logits, once, with autograd, and goes on with them.

Reading late gives the logits of the forward pass that made them, or an error: the grad mode and the
autocast state of that forward hold, and a head or hidden states that have changed since are
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from liger_patch.kernels.compilation import runs_eagerly


class Owner(Protocol):
    """The forward pass that deferred logits belong to."""

    def note_read(self, operation: str) -> None:
        """Take note that the named operation needs the values of the logits."""


class Step(NamedTuple):
    """One recorded operation on logits (..., V).

    Attributes:
        kind: "scale", "tanh", "cast", "rows" or "detach".
        apply: the operation on real logits; for "rows" also on hidden states, as it leaves the last
            dimension whole.
        factor: what "scale" multiplies by.
    """

    kind: str
    apply: Callable[[Tensor], Tensor]
    factor: float = 1.0


class Parts(NamedTuple):
    """What deferred logits are made of: a linear product, a scale and a softcap.

    ``softcap * tanh(logit_scale * x / softcap)``, or ``logit_scale * x``, of ``x = linear(...)``.

    Attributes:
        hidden_states: (..., H), the rows that were chosen.
        weight: (V, H).
        bias: (V,) or None.
        logit_scale: 1.0 for none.
        softcap: None for none.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    softcap: float | None


@dataclass(frozen=True)
class HeadCall:
    """One call of the output embedding: its inputs, the state it was made in, and its owner."""

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    grad_enabled: bool
    autocast_dtype: torch.dtype | None
    versions: tuple[int | None, ...]
    owner: Owner

    @classmethod
    def of(
        cls, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, owner: Owner
    ) -> HeadCall:
        device_type = hidden_states.device.type
        autocast_dtype = (
            torch.get_autocast_dtype(device_type)
            if torch.is_autocast_enabled(device_type)
            else None
        )
        versions = tuple(_version(t) for t in (hidden_states, weight, bias))
        return cls(
            hidden_states, weight, bias, torch.is_grad_enabled(), autocast_dtype, versions, owner
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_states.dtype if self.autocast_dtype is None else self.autocast_dtype

    def linear(self, hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The product in the autocast state of the call."""
        enabled = self.autocast_dtype is not None
        with torch.autocast(hidden_states.device.type, dtype=self.autocast_dtype, enabled=enabled):
            return nn.functional.linear(hidden_states, weight, bias)

    def logits(self) -> Tensor:
        """The real logits, in the grad mode and the autocast state of the call."""
        self.check_unchanged()
        with torch.set_grad_enabled(self.grad_enabled):
            return self.linear(self.hidden_states, self.weight, self.bias)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if what the logits are computed from has changed since."""
        tensors = {
            "hidden states": self.hidden_states,
            "head's weight": self.weight,
            "head's bias": self.bias,
        }
        for (name, tensor), version in zip(tensors.items(), self.versions, strict=True):
            if tensor is None:
                continue
            if _version(tensor) != version or tensor.untyped_storage().size() == 0 < tensor.numel():
                raise RuntimeError(
                    f"outputs.logits are computed when they are first read, but the {name} changed "
                    "since the forward pass (an optimizer step, or sharding that freed them): "
                    "read outputs.logits before that, or set LIGER_PATCH_RETURN_LOGITS=1 to "
                    "compute them in every forward pass"
                )


def _version(tensor: Tensor | None) -> int | None:
    return None if tensor is None or tensor.is_inference() else tensor._version


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
        return make()

    @staticmethod
    def backward(ctx, grad_output: Tensor):
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


class DeferredLogits(Tensor):
    """The logits (..., V) of one forward pass, computed when their values are first needed."""

    _head_call: HeadCall
    _rows: Tensor  # (..., H), the hidden states of the rows that were chosen so far
    _parent: DeferredLogits | None
    _step: Step | None
    _is_view: bool  # whether eager's result of the step would share its parent's memory
    _grad_enabled: bool  # while the step was recorded
    _value: Tensor | None

    @classmethod
    def of_head(cls, call: HeadCall) -> DeferredLogits:
        inputs = (call.hidden_states, call.weight, call.bias)
        rows = call.hidden_states.contiguous()  # as the product is, whose views they stand for
        return cls._make(call, rows, call.dtype, call.linear, inputs, None, None)

    def then(self, step: Step, *, dtype: torch.dtype | None = None) -> Tensor:
        """These logits after one more operation.

        It is recorded, or real where somebody has read (and may have written to) these logits or
        those that they stem from.
        """
        node: DeferredLogits | None = self
        while node is not None:
            if node._value is not None:
                return step.apply(self.real_logits())
            node = node._parent
        rows = step.apply(self._rows) if step.kind == "rows" else self._rows
        if step.kind not in ("rows", "detach"):
            rows = rows.contiguous()  # as the result of an elementwise operation on a slice is
        return self._make(
            self._head_call, rows, dtype or self.dtype, step.apply, (self,), self, step
        )

    @classmethod
    @runs_eagerly  # Dynamo cannot trace _make_wrapper_subclass, and warns of it
    def _make(
        cls,
        call: HeadCall,
        rows: Tensor,
        dtype: torch.dtype,
        compute: Callable[..., Tensor],
        inputs: tuple[Tensor | None, ...],
        base: DeferredLogits | None,
        step: Step | None,
    ) -> DeferredLogits:
        vocab_size, hidden_size = call.weight.shape

        def make() -> Tensor:
            return Tensor._make_wrapper_subclass(
                cls,
                (*rows.shape[:-1], vocab_size),
                strides=(*(stride // hidden_size * vocab_size for stride in rows.stride()[:-1]), 1),
                dtype=dtype,
                device=call.weight.device,
            )

        grad_enabled = torch.is_grad_enabled()
        recorded = grad_enabled and not (step is not None and step.kind == "detach")
        with torch._C.DisableTorchFunctionSubclass(), torch.set_grad_enabled(recorded):
            deferred = _Record.apply(compute, make, *inputs)
        deferred._head_call, deferred._rows, deferred._parent, deferred._step = (
            call,
            rows,
            base,
            step,
        )
        deferred._grad_enabled = grad_enabled
        deferred._is_view = (
            base is not None
            and step is not None
            and step.kind in ("rows", "detach")
            and _share_memory(rows, base._rows)
        )
        deferred._value = None
        return deferred

    def real_logits(self) -> Tensor:
        """The real logits, computed at the first call."""
        if self._value is None:
            self._value = self._compute(lambda parent: parent.real_logits())
        return self._value

    def _compute(self, of_view: Callable[[DeferredLogits], Tensor]) -> Tensor:
        parent, step = self._parent, self._step
        if parent is None or step is None:
            return self._head_call.logits()
        # A view shares the memory of its parent. What eager copies was copied before anybody read
        # these logits, let alone wrote to them: it is computed from the head again.
        value = of_view(parent) if self._is_view else parent._compute_untouched()
        with torch.set_grad_enabled(self._grad_enabled):
            return step.apply(value)

    def _compute_untouched(self) -> Tensor:
        return self._compute(DeferredLogits._compute_untouched)

    def parts(self) -> Parts | None:
        """What a fused loss needs, or None where the steps are not a scale and a softcap."""
        chain: list[Step] = []
        node = self
        while node._parent is not None and node._step is not None:
            chain.append(node._step)
            node = node._parent
        call = self._head_call
        scale, cap_scale, capped = 1.0, 1.0, False
        for step in reversed(chain):
            if step.kind == "scale" and capped:
                cap_scale *= step.factor
            elif step.kind == "scale":
                scale *= step.factor
            elif step.kind == "tanh" and not capped:
                capped = True
            elif step.kind not in ("rows", "cast", "detach"):
                return None
        if not capped:
            return Parts(self._rows, call.weight, call.bias, scale, None)
        if cap_scale <= 0:
            return None
        # b * tanh(a * x) = softcap * tanh(logit_scale * x / softcap) with softcap = b, logit_scale
        # = a * b
        return Parts(self._rows, call.weight, call.bias, scale * cap_scale, cap_scale)

    @property
    def is_computed(self) -> bool:
        return self._value is not None

    @property
    def owner(self) -> Owner:
        return self._head_call.owner

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in NEED_A_GRADIENT:
            raise RuntimeError(
                f"{func.__name__} of outputs.logits: the fused loss has no gradient with respect "
                "to them. Set LIGER_PATCH_RETURN_LOGITS=1 for real logits and an ordinary loss"
            )
        recorded = RECORDED.get(func)
        if recorded is not None and (func in TAKE_KEYWORDS or not kwargs):
            result = recorded(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            if func in METADATA and args and not args[0].is_computed:
                return func(*args, **kwargs)
            name = getattr(func, "__name__", str(func))
            args, kwargs = tree_map_only(DeferredLogits, lambda d: _read(d, name), (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # below autograd, which has been recorded by _Record already: values only
        if func is torch.ops.aten.detach.default:
            return args[0]
        args, kwargs = tree_map_only(
            DeferredLogits, lambda d: _read(d, str(func)).detach(), (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __hash__(self) -> int:
        return id(self)

    def __reduce_ex__(self, protocol):
        return real(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return real(self).__deepcopy__(memo)


def _read(deferred: DeferredLogits, name: str) -> Tensor:
    if deferred._value is None:
        deferred.owner.note_read(name)
    return deferred.real_logits()


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def real(tensor: Tensor) -> Tensor:
    """The tensor itself, or the real logits that it defers."""
    return tensor.real_logits() if isinstance(tensor, DeferredLogits) else tensor


class _DeferLinear(TorchFunctionMode):
    """Within the head's own forward: its product with its own weight is deferred."""

    def __init__(self, head: nn.Module, owner: Owner) -> None:
        super().__init__()
        self.head, self.owner = head, owner

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            hidden_states, weight, bias = _linear_arguments(*args, **kwargs)
            if weight is getattr(self.head, "weight", None) and _can_defer(
                hidden_states, weight, bias
            ):
                return DeferredLogits.of_head(HeadCall.of(hidden_states, weight, bias, self.owner))
        return func(*args, **kwargs)


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _can_defer(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are plain floating-point tensors that fit each other, on one device."""
    tensors = [tensor for tensor in (hidden_states, weight, bias) if tensor is not None]
    if any(
        type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_floating_point()
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
def deferring_head(head: nn.Module, owner: Owner) -> Iterator[None]:
    """Within this context the output embedding ``head`` defers its product with its weight.

    Its hooks and whatever has replaced its ``forward`` run as always; a head that computes in
    another way (quantised, a tensor subclass) returns its real logits.
    """
    missing = object()
    before = vars(head).get("forward", missing)
    forward = head.forward

    def deferring_forward(*args, **kwargs):
        with _DeferLinear(head, owner):
            return forward(*args, **kwargs)

    head.forward = deferring_forward
    try:
        yield
    finally:
        if before is missing:
            del head.forward
        else:
            head.forward = before


def _scale(a: Any, b: Any) -> Tensor:
    deferred, number = (a, b) if isinstance(a, DeferredLogits) else (b, a)
    if not _is_number(number) or not isinstance(deferred, DeferredLogits):
        return NotImplemented
    return deferred.then(Step("scale", lambda t: t * number, float(number)))


def _divide(a: Any, b: Any) -> Tensor:
    if not isinstance(a, DeferredLogits) or not _is_number(b) or b == 0:
        return NotImplemented
    return a.then(Step("scale", lambda t: t / b, 1.0 / b))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _tanh(logits: DeferredLogits) -> Tensor:
    return logits.then(Step("tanh", torch.tanh))


def _cast(logits: DeferredLogits, dtype: torch.dtype) -> Tensor:
    if dtype == logits.dtype:
        return logits
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return NotImplemented
    return logits.then(Step("cast", lambda t: t.to(dtype)), dtype=dtype)


def _to(logits: Any, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(logits, DeferredLogits) or kwargs.keys() - {"non_blocking"} or len(args) != 1:
        return NotImplemented
    (target,) = args
    if isinstance(target, torch.dtype):
        return _cast(logits, target)
    if isinstance(target, (str, torch.device)) and torch.device(target) == logits.device:
        return logits
    return NotImplemented


def _rows(logits: DeferredLogits, apply: Callable[[Tensor], Tensor]) -> Tensor:
    return logits.then(Step("rows", apply))


def _getitem(logits: Any, index: Any) -> Tensor:
    if not isinstance(logits, DeferredLogits):
        return NotImplemented
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is Ellipsis or _is_row_index(item) for item in items):
        return NotImplemented
    used = sum(
        item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1 for item in items
    )
    if any(item is Ellipsis for item in items):
        # only the leading dimensions, or the last one taken whole
        position = next(i for i, item in enumerate(items) if item is Ellipsis)
        if position != len(items) - 1 and items[-1] != slice(None):
            return NotImplemented
        # an ellipsis at the end says nothing of the last dimension: it must be left to it
        if used - 1 > logits.dim() - (position == len(items) - 1):
            return NotImplemented
    elif used > logits.dim() - 1 and not (used == logits.dim() and items[-1] == slice(None)):
        return NotImplemented
    return _rows(logits, lambda t: t[index])


def _is_row_index(item: Any) -> bool:
    if isinstance(item, Tensor):
        return type(item) is Tensor and item.dtype in (torch.bool, torch.int64)
    return isinstance(item, (int, slice)) and not isinstance(item, bool)


def _reshape(logits: Any, *shape: Any) -> Tensor:
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not isinstance(logits, DeferredLogits) or isinstance(sizes, torch.dtype) or len(sizes) < 2:
        return NotImplemented
    if sizes[-1] != logits.shape[-1]:
        return NotImplemented
    leading = tuple(sizes[:-1])
    return _rows(logits, lambda t: t.reshape(*leading, t.shape[-1]))


def _view(logits: Any, *shape: Any) -> Tensor:
    result = _reshape(logits, *shape)
    if isinstance(result, DeferredLogits) and not result._is_view:
        return NotImplemented  # the real logits say why there is no such view
    return result


def _contiguous(logits: DeferredLogits) -> Tensor:
    return logits if logits.is_contiguous() else _rows(logits, Tensor.contiguous)


def _detach(logits: DeferredLogits) -> Tensor:
    return logits.then(Step("detach", Tensor.detach))


# what is recorded: torch function -> handler, which returns NotImplemented for arguments that it
# does not cover. The loss adds torch.nn.functional.cross_entropy.
RECORDED: dict[Callable, Callable] = {
    **dict.fromkeys(
        (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply, torch.mul, torch.multiply),
        _scale,
    ),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, Tensor.divide, Tensor.true_divide), _divide),
    **dict.fromkeys((torch.div, torch.divide, torch.true_divide), _divide),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _tanh),
    Tensor.float: lambda logits: _cast(logits, torch.float32),
    Tensor.bfloat16: lambda logits: _cast(logits, torch.bfloat16),
    Tensor.half: lambda logits: _cast(logits, torch.float16),
    Tensor.to: _to,
    Tensor.__getitem__: _getitem,
    **dict.fromkeys((Tensor.reshape, torch.reshape), _reshape),
    Tensor.view: _view,
    Tensor.contiguous: _contiguous,
    Tensor.detach: _detach,
}

# those of them whose handlers take keywords
TAKE_KEYWORDS: set[Callable] = {Tensor.to}

_METADATA_PROPERTIES = """
    shape dtype device ndim layout is_cuda is_cpu is_meta is_sparse is_mps is_xpu is_quantized
    is_nested requires_grad grad_fn is_leaf itemsize nbytes
"""
_METADATA_METHODS = """
    size dim numel nelement ndimension element_size is_floating_point is_complex is_contiguous
    stride get_device __len__ is_inference is_shared
"""
# what is refused
NEED_A_GRADIENT: frozenset[Callable] = frozenset([Tensor.register_hook, Tensor.retain_grad])
# what is answered without values
METADATA: frozenset[Callable] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _METADATA_PROPERTIES.split()),
        *(getattr(Tensor, name) for name in _METADATA_METHODS.split()),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference),
    ]
)
