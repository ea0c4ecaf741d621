"""What torch.compile is to make of functions that read the device and launch kernels themselves."""

import functools
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

Function = TypeVar("Function", bound=Callable)
_defined: dict[str, str] = {}  # names of operators -> files
DEVICES = ("cpu", "cuda", "mps", "xpu")  # PyTorch operations serve where Triton does not
GUARDS_SCALARS = torch.__version__ >= "2.8"  # before, Dynamo breaks the graph at guard_scalar


def constant(number: float) -> float:
    """The number as an autograd function takes it: with ``dynamic=True`` torch.compile traces the
    floats that modules hold as symbols, which are an error among its arguments.
    """
    return guard_scalar(number) if GUARDS_SCALARS and torch.compiler.is_compiling() else number


def runs_eagerly(function: Function) -> Function:
    """Decorator: torch.compile calls the function as it is, between two graphs of its own."""
    return cast(Function, torch.compiler.disable(function))


def operator(
    results: Callable[..., object], *, mutates: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """Decorator: ``name`` or ``_name`` is the operator ``liger_patch::name``, which torch.compile,
    ``torch.jit.trace`` and dispatch modes (``make_fx``, ``FakeTensorMode``) see and do not look
    into. Elsewhere the function runs as it is, without the dispatcher's microseconds.

    Args:
        results: of the same arguments, without values, for torch.compile.
        mutates: the arguments that it writes to.
    """

    def register(function: Function) -> Function:
        name = function.__name__.lstrip("_")
        file = function.__module__.rpartition(".")[2]
        if _defined.get(name) != file:  # else it is imported again, by the link at the root
            _defined[name] = file
            schema = torch.library.infer_schema(function, mutates_args=mutates)
            torch.library.define(f"liger_patch::{name}", schema)
            torch.library.impl(f"liger_patch::{name}", DEVICES)(function)
            torch.library.register_fake(f"liger_patch::{name}")(results)

        @functools.wraps(function)
        def call(*arguments: object) -> object:
            if torch.compiler.is_compiling() or _is_watched(arguments):
                return getattr(torch.ops.liger_patch, name)(*arguments)
            return function(*arguments)

        return cast(Function, call)

    return register


def _is_watched(arguments: tuple[object, ...]) -> bool:
    """Whether somebody records the operators that run, or has them run on no values."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return torch._C._is_tracing()
    # DTensor has rules for PyTorch's operations, of which the functions are made, and not for these
    return not any(hasattr(each, "device_mesh") for each in arguments)
