"""Try on the CPU whether a kernel computes what a layer's own forward computes.

A probe runs both on a few numbers. Layers of one configuration need one probe.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from liger_patch.layers.checks import EVERYWHERE

PLAIN = bool, int, float, str, type(None), torch.dtype  # compared by value
# the tensors, modules and hooks that each module holds
CONTAINERS = vars(nn.Module()).keys() - {"training"}


@contextmanager
def probing() -> Iterator[None]:
    """Compute on the CPU within this context, without gradients and autocast."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), ExitStack() as stack:
        # the caller may be in a mode without values: FakeTensorMode, torch.device("meta")
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.device("cpu"))
        yield


def results_match(*ways: Callable[[], Sequence[Tensor]]) -> bool:
    """Return whether two ways to compute a few tensors give the same results on the CPU. False if
    one of them raises an error.
    """
    with probing():
        try:
            pairs = list(zip(*(way() for way in ways), strict=True))
            return all(a.dtype == b.dtype and torch.allclose(a, b, rtol=2e-2) for a, b in pairs)
        except Exception:  # other arguments, or other attributes, than the kernel knows
            return False


def few_numbers(*shape: int) -> Tensor:
    """Return numbers in [-1, 1] for a probe, the same at each call."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).mul(0.7).sin().view(shape)


def probe_of(module: nn.Module) -> Any:
    """Return a copy of a module, with parameters and buffers of its own, that runs on the kernels'
    operations in PyTorch. No class is called: FSDP2's makes a module of another.
    """
    probe: Any = object.__new__(type(module))
    vars(probe).update(vars(module))
    probe._parameters, probe._buffers = dict(module._parameters), dict(module._buffers)
    setattr(probe, EVERYWHERE, True)
    return probe


def with_weight(module: nn.Module, weight: Tensor) -> Any:
    """Return a copy of a module with another weight. FSDP holds the weight as a plain attribute."""
    probe = probe_of(module)
    del probe.weight
    probe.register_parameter("weight", nn.Parameter(weight))
    return probe


def configuration(module: nn.Module, without: Collection[str] = ()) -> Hashable:
    """Return the class and the attributes of a module, as a key: modules with equal keys need only
    one probe.

    Numbers, strings and dtypes count by value, the modules within by their own configuration, all
    else (tensors too) by identity. So the key is valid only as long as the module lives.

    Args:
        without: names of the attributes that a probe replaces by its own.
    """
    attributes = {n: value for n, value in vars(module).items() if n not in CONTAINERS}
    attributes |= module._parameters | module._buffers
    compared = {name: _compared(value) for name, value in attributes.items() if name not in without}
    for name, child in module._modules.items():
        if name not in without:
            compared[name] = None if child is None else configuration(child)
    return type(module), frozenset(compared.items())


def _compared(value: object) -> Hashable:
    if isinstance(value, functools.partial):  # the activation of Transformers' GELUTanh
        options = frozenset((name, _compared(each)) for name, each in value.keywords.items())
        return id(value.func), tuple(_compared(each) for each in value.args), options
    return (type(value), value) if isinstance(value, PLAIN) else id(value)
