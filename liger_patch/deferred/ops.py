"""The operations on deferred logits that are recorded instead of computed.

What models do between head and loss: multiplication and division by a number, ``tanh``, casts, the
sum of several products (LoRA on the head), and the choice of rows (slices, masks, ``view``,
``flatten``), which leaves the last dimension whole and so applies to hidden states as well.
``cross_entropy`` is handed to the forward pass. A handler takes the arguments of its torch function
and returns NotImplemented for those that it does not cover.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_patch.deferred.record import Recordable, Step


def _with_leading(tensor: Tensor, *sizes: int) -> Tensor:
    return tensor.reshape(*sizes, tensor.shape[-1])


def _scale(a: Any, b: Any) -> Tensor:
    deferred, factor = (a, b) if isinstance(a, Recordable) else (b, a)
    number = _number(factor)
    if number is None or not isinstance(deferred, Recordable):
        return NotImplemented
    return deferred.then(Step("scale", torch.mul, (number,), float(number)))


def _divide(a: Any, b: Any) -> Tensor:
    number = _number(b)
    if not isinstance(a, Recordable) or not number:
        return NotImplemented
    return a.then(Step("scale", torch.div, (number,), 1.0 / number))


def _add(*summands: Any) -> Tensor:
    """Record the sum of two products of a head (LoRA)."""
    if len(summands) != 2:
        return NotImplemented
    a, b = summands
    if not isinstance(a, Recordable) or not isinstance(b, Recordable):
        return NotImplemented
    if a.shape != b.shape or a.device != b.device:
        return NotImplemented
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.then(Step("add", torch.add, other=b), dtype=dtype)


def _number(value: Any) -> Any:
    """Return a number, also that of a tensor without dimensions, as PEFT scales by in adapters that
    it has prepared for hotswaps; None for anything else.
    """
    if type(value) is Tensor and value.dim() == 0 and value.is_floating_point():
        return None if value.requires_grad or value.is_meta else value.item()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else None


def _tanh(logits: Recordable) -> Tensor:
    return logits.then(Step("tanh", torch.tanh))


def _cast(logits: Recordable, dtype: torch.dtype) -> Tensor:
    if dtype == logits.dtype:
        return logits
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return NotImplemented
    return logits.then(Step("cast", Tensor.to, (dtype,)), dtype=dtype)


def _to(logits: Any, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(logits, Recordable) or kwargs.keys() - {"non_blocking"} or len(args) != 1:
        return NotImplemented
    (target,) = args
    if isinstance(target, torch.dtype):
        return _cast(logits, target)
    if isinstance(target, (int, str, torch.device)) and not isinstance(target, bool):
        return _move(logits, torch.device(target), *kwargs.values())
    return NotImplemented


def _move(logits: Recordable, target: torch.device, non_blocking: bool = False) -> Tensor:
    """Record a move to a device, as accelerate moves the outputs of a model on several."""
    device = torch.empty(0, device=target).device  # with its index
    if device == logits.device:
        return logits
    return logits.then(Step("move", Tensor.to, (device, None, non_blocking)), device=device)


def _rows(logits: Recordable, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return logits.then(Step("rows", function, arguments))


def _getitem(logits: Any, index: Any) -> Tensor:
    """Record a choice of rows. It is applied when logits are computed: tensors in the index, which
    their owner may change by then, are copied.
    """
    if not isinstance(logits, Recordable):
        return NotImplemented
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is Ellipsis or _is_row_index(item) for item in items):
        return NotImplemented
    rows = [item for item in items if item is not Ellipsis]
    used = sum(
        item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1 for item in rows
    )
    last = items[-1] if items else None
    # the last dimension is left whole: taken as it is, or by what the others leave to it
    is_left = used < logits.dim() and (last is Ellipsis or len(rows) == len(items))
    if not (is_left or (last == slice(None) and used <= logits.dim())):
        return NotImplemented
    return _rows(
        logits, operator.getitem, tuple(i.clone() if isinstance(i, Tensor) else i for i in items)
    )


def _is_row_index(item: Any) -> bool:
    if isinstance(item, Tensor):
        return type(item) is Tensor and item.dtype in (torch.bool, torch.int64)
    if isinstance(item, slice):  # other ends may be changed by their owner
        return all(end is None or type(end) is int for end in (item.start, item.stop, item.step))
    return isinstance(item, int) and not isinstance(item, bool)


def _reshape(logits: Any, *shape: Any) -> Tensor:
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if not isinstance(logits, Recordable) or isinstance(sizes, torch.dtype) or len(sizes) < 2:
        return NotImplemented
    if sizes[-1] != logits.shape[-1]:
        return NotImplemented
    return _rows(logits, _with_leading, *sizes[:-1])


def _view(logits: Any, *shape: Any) -> Tensor:
    result = _reshape(logits, *shape)
    if isinstance(result, Recordable) and not result.shares_memory:
        return NotImplemented  # the real logits say why there is no such view
    return result


def _flatten(input: Any, start_dim: Any = 0, end_dim: Any = -1, **others: Any) -> Tensor:
    is_plain = isinstance(start_dim, int) and isinstance(end_dim, int) and not others
    if not isinstance(input, Recordable) or not is_plain:
        return NotImplemented
    start, end = (dim + input.dim() if dim < 0 else dim for dim in (start_dim, end_dim))
    if not 0 <= start <= end < input.dim() - 1:
        return NotImplemented
    return input if start == end else _rows(input, Tensor.flatten, start, end)


def _contiguous(logits: Recordable) -> Tensor:
    return logits if logits.is_contiguous() else _rows(logits, Tensor.contiguous)


def _clone(logits: Recordable) -> Tensor:
    # a clone is how a user keeps values; but DistributedDataParallel clones every output that needs
    # a gradient, in an autograd function of its own
    is_compiled = torch.compiler.is_compiling()  # no frames there
    if is_compiled or torch.is_grad_enabled() or not _is_called_by_ddp():
        return NotImplemented
    return logits.then(Step("clone", Tensor.clone))


def _is_called_by_ddp() -> bool:
    sink = getattr(sys.modules.get("torch.nn.parallel.distributed"), "_DDPSink", None)
    if sink is None:
        return False
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is sink.forward.__code__:  # which does nothing else
            return True
        frame = frame.f_back
    return False


def _detach(logits: Recordable) -> Tensor:
    return logits.then(Step("detach", Tensor.detach))


def _cross_entropy(input: Any, *args: Any, **kwargs: Any) -> Tensor:
    if not isinstance(input, Recordable):
        return NotImplemented
    return input.head_call.owner.cross_entropy(input, *args, **kwargs)


# torch function -> handler
RECORDED: dict[Callable, Callable] = {
    **dict.fromkeys(
        (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply, torch.mul, torch.multiply),
        _scale,
    ),
    **dict.fromkeys((Tensor.add, Tensor.__add__, torch.add), _add),
    **dict.fromkeys((Tensor.div, Tensor.__truediv__, Tensor.divide, Tensor.true_divide), _divide),
    **dict.fromkeys((torch.div, torch.divide, torch.true_divide), _divide),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _tanh),
    Tensor.float: lambda logits: _cast(logits, torch.float32),
    Tensor.bfloat16: lambda logits: _cast(logits, torch.bfloat16),
    Tensor.half: lambda logits: _cast(logits, torch.float16),
    Tensor.double: lambda logits: _cast(logits, torch.float64),
    Tensor.to: _to,
    Tensor.__getitem__: _getitem,
    **dict.fromkeys((Tensor.reshape, torch.reshape), _reshape),
    Tensor.view: _view,
    **dict.fromkeys((Tensor.flatten, torch.flatten), _flatten),
    Tensor.contiguous: _contiguous,
    Tensor.detach: _detach,
    **dict.fromkeys((Tensor.clone, torch.clone), _clone),
    nn.functional.cross_entropy: _cross_entropy,
}
# other handlers take none
TAKE_KEYWORDS = frozenset({Tensor.to, Tensor.flatten, torch.flatten, nn.functional.cross_entropy})

_METADATA_PROPERTIES = """
    shape dtype device ndim layout is_cuda is_cpu is_meta is_sparse is_mps is_xpu is_quantized
    is_nested requires_grad grad_fn is_leaf itemsize nbytes _base
"""
_METADATA_METHODS = """
    size dim numel nelement ndimension element_size is_floating_point is_complex is_contiguous
    stride get_device __len__ is_inference is_shared _is_view
"""
# what is answered without values
METADATA: frozenset[Callable] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _METADATA_PROPERTIES.split()),
        *(getattr(Tensor, name) for name in _METADATA_METHODS.split()),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference),
    ]
)
