"""Which modules run on kernels, and which calls of them do. And probes: whether a kernel computes
what a layer's own forward computes, tried on the CPU with a few numbers. Layers of one
configuration need one probe.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from liger_patch.kernels.backend import HAS_TRITON, PLAIN_TENSORS, TRITON_DEVICES
from liger_patch.kernels.graphs import is_exporting

LAYER_NAMES = "_liger_patch_layers"  # attribute of the classes on kernels
EVERYWHERE = "_liger_patch_everywhere"  # attribute of layers that apply_patch was asked for by name
# devices with kernels; "meta" computes what they would
DEVICES = ("meta", *(TRITON_DEVICES if HAS_TRITON else ()))
PRODUCT = nn.Linear.forward, nn.functional.linear  # torch's own: DeepSpeed replaces the second
ZERO3 = "deepspeed.runtime.zero.", "deepspeed.utils.nvtx"  # modules of its hooks, some decorated
PLAIN = bool, int, float, str, type(None), torch.dtype  # compared by value
# the tensors, modules and hooks that each module holds
CONTAINERS = vars(nn.Module()).keys() - {"training"}
_call = threading.local()  # whether the call that this thread runs decodes
# the hooks of saved tensors; torch 2.6 has no such function
TOP_HOOKS = getattr(cast(Any, torch._C)._autograd, "_top_saved_tensors_default_hooks", None)


def names_of(cls: Any) -> frozenset[str]:
    """Return the names in the code of a class's forward, without its decorators; none where that is
    no Python function.
    """
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def layers_of(module: object) -> tuple[str, ...]:
    """Return as which kinds of layers a module runs on kernels; an attention may be of two."""
    return getattr(type(module), LAYER_NAMES, ())


@contextmanager
def decoding() -> Iterator[None]:
    """Within this context, a call of this thread generates one token a row: its time is that of
    launches, and layers run the model's own code.
    """
    _call.decodes = True
    try:
        yield
    finally:
        _call.decodes = False


def is_left_to_model(layer: nn.Module, x: object) -> bool:
    """Return whether a call of a layer on x runs the model's own code, because kernels would not be
    faster: in ``decoding``, and on a device that has none. There, only layers that ``apply_patch``
    was asked for by name compute the same with PyTorch's operations.
    """
    # Dynamo traces no thread's variables
    if not torch.compiler.is_compiling() and getattr(_call, "decodes", False):
        return True
    is_elsewhere = isinstance(x, Tensor) and x.device.type not in DEVICES
    return is_elsewhere and EVERYWHERE not in layer.__dict__


def check_device(device: torch.device | str | None) -> None:
    """Raise ValueError for what is no device, and for a CUDA device where there is none."""
    try:
        kind = "cpu" if device is None else torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a device of PyTorch, got {device!r}") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be available, and no CUDA GPU is, got {device!r}")


def needs_own_code(*arguments: object) -> bool:
    """Return whether a layer's own code must run.

    It must where torch.func transforms the call: the kernels have no rules for that. It must under
    ``torch.export(strict=True)``, whose programs lose the gradients of autograd functions. It must,
    too, where an argument is a tensor without memory of its own, which a kernel cannot read: a
    DTensor, or the result of a collective that has not finished.
    """
    if torch._C._are_functorch_transforms_active():
        return True
    if torch.compiler.is_dynamo_compiling() and is_exporting():
        return True
    for each in arguments:
        # most arguments are of these classes, and this test is the faster one
        if type(each) not in PLAIN_TENSORS and is_traceable_wrapper_subclass(each):
            return True
    return False


def packs_saved_tensors() -> bool:
    """Return whether hooks take the tensors that autograd saves for the backward pass.

    Gradient checkpointing has such hooks, and so has offloading.
    """
    # not is_compiling(), which is true in all threads while one compiles
    if TOP_HOOKS is None or torch.compiler.is_dynamo_compiling():
        return False
    return TOP_HOOKS(False) is not None


def has_hooks(*modules: nn.Module) -> bool:
    """Return whether a call of one of the modules does more than its class's forward.

    ZeRO-3 hooks every module to gather its parameters: that is nothing where it has none.
    """
    if (
        _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    ):
        return True
    for module in modules:
        if module._backward_hooks or module._backward_pre_hooks or "forward" in module.__dict__:
            return True
        if module._forward_hooks or module._forward_pre_hooks:
            hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
            names = [getattr(each, "__module__", None) or "" for each in hooks]
            gather = all(name.startswith(ZERO3) for name in names)
            if not gather or next(module.parameters(), None) is not None:
                return True
    return False


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
    """Return a shallow copy of a module, whose parameters and buffers can be replaced. It runs the
    kernels' PyTorch operations. No class is called: FSDP2's makes a module of another.
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
