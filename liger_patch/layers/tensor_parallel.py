"""Derive the class of linear layers that Transformers' tensor-parallel plan distributes.

Transformers computes them as ``DTensor``, at a cost to the host of several times what the product
takes on a GPU, and sums the gradient of one input once for each layer that reads it. Here a layer
multiplies by this rank's own part of its weight, and layers that read one input sum its gradient
once.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from liger_patch.kernels.graphs import is_compiled_here
from liger_patch.layers.checks import LAYER_NAMES, needs_own_code
from liger_patch.subclass import derived_class, once_for_each_class

STYLES = "ColwiseParallel", "RowwiseParallel"  # of Transformers' plan
_running = threading.local()  # the inputs that the layer of this thread has shared


class Part(NamedTuple):
    """What a rank multiplies by: some columns of the result, or some features of the input."""

    weight: Any  # DTensor (O, I)
    bias: Any  # DTensor (O,), or None
    splits_outputs: bool  # this rank holds some rows of the weight

    @property
    def group(self) -> Any:
        return self.weight.device_mesh.get_group()


def is_parallel_linear(module: nn.Module) -> bool:
    """Return whether a plan's style has replaced the forward of this linear layer, in the layout
    of projections: whole inputs and the result in parts, or the other way round.
    """
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    style = _style(module)
    if type(style).__name__ not in STYLES or not style.use_local_output:
        return False
    whole, part = style.input_layouts, style.output_layouts
    if type(style).__name__ == "RowwiseParallel":
        whole, part = part, whole
    return whole.is_replicate() and part.is_shard(-1)


def _style(module: nn.Module) -> Any:
    """Return the style that Transformers' plan has given a module; None where there is none."""
    forward = vars(module).get("forward")
    if not isinstance(forward, types.FunctionType):  # a hook of accelerate is a partial
        return None
    if not (forward.__module__ or "").startswith("transformers.distributed"):
        return None
    names, cells = forward.__code__.co_freevars, forward.__closure__ or ()
    found = {n: cell.cell_contents for n, cell in zip(names, cells, strict=True)}
    return found.get("self") if found.get("module") is module else None


def parallel_linear_class(module: nn.Module) -> Any:
    """Return the class of such a layer that multiplies by its own part."""
    return parallel_linear(type(module))


@once_for_each_class
def parallel_linear(original: Any) -> type[nn.Module]:
    """Derive a linear layer whose forward in training multiplies by this rank's own part.

    The plan's forward is an attribute of the instance. A property of the class comes before it, so
    hooks run around either: what one rank alone hooks must not change its number of sums.
    """

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        part = None if len(arguments) != 1 or options else _part(self, arguments[0])
        if part is None:
            return vars(self)["forward"](*arguments, **options)
        return _product(arguments[0], part)

    def chosen(self) -> Any:
        own = vars(self).get("forward")
        if own is None:
            return types.MethodType(original.forward, self)
        return own if _style(self) is None else types.MethodType(forward, self)

    def replace(self, value: Any) -> None:
        vars(self)["forward"] = value

    def remove(self) -> None:
        del vars(self)["forward"]

    return derived_class(
        original,
        parallel_linear,
        forward=property(chosen, replace, remove),
        _liger_patch_layers=("tensor_parallel",),
    )


def _part(module: Any, x: Any) -> Part | None:
    """Return what this rank multiplies by, or None where the plan's own code must run: without
    gradients it is as fast.
    """
    if not torch.is_grad_enabled() or is_compiled_here() or needs_own_code(x):
        return None
    weight, bias = module.weight, module.bias
    placements = getattr(weight, "placements", ())
    if len(placements) != 1 or not placements[0].is_shard():
        return None
    return Part(weight, bias, placements[0].dim == 0)


def _product(x: Tensor, part: Part) -> Tensor:
    weight = part.weight.to_local()
    bias = None if part.bias is None else part.bias.to_local()
    if part.splits_outputs:
        return nn.functional.linear(_shared(x, part.group), weight, bias)
    y = _Sum.apply(nn.functional.linear(x, weight), part.group)
    return y if bias is None else y + bias.to(y.dtype)  # under autocast, that of the product


def has_parallel_projection(layer: nn.Module, name: str) -> bool:
    """Return whether the projection of this name of a layer multiplies by a rank's own part."""
    return "tensor_parallel" in getattr(type(layer._modules.get(name)), LAYER_NAMES, ())


@contextmanager
def sharing_inputs() -> Iterator[None]:
    """Within this context, layers that read the same input sum its gradient once, on all ranks."""
    before = getattr(_running, "inputs", None)
    _running.inputs = {}
    try:
        yield
    finally:
        _running.inputs = before


def _shared(x: Tensor, group: Any) -> Tensor:
    """Return x, whose gradient is summed over the ranks: one tensor for all calls with this x."""
    inputs = getattr(_running, "inputs", None)
    if inputs is None:
        return _SumOfGradients.apply(x, group)
    key = id(x), x._version, group
    if key not in inputs:
        inputs[key] = x, _SumOfGradients.apply(x, group)  # with x itself, whose id stays its own
    return inputs[key][1]


class _Sum(torch.autograd.Function):
    """The sum of a tensor over the ranks; all have the same gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, *grad_outputs: Any) -> Any:
        return _SumOfGradients.apply(grad_outputs[0], ctx.group), None


class _SumOfGradients(torch.autograd.Function):
    """A tensor that all ranks have; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grad_outputs: Any) -> Any:
        return _Sum.apply(grad_outputs[0], ctx.group), None
