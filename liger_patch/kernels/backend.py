"""Questions that every operator asks: whether Triton kernels or PyTorch operations serve a tensor,
and in which dtype. Also what autocast, autograd and torch.compile need of functions that launch
kernels.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.nn import Parameter
from torch.utils import checkpoint
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

Function = TypeVar("Function", bound=Callable)
HAS_TRITON = importlib.util.find_spec("triton") is not None
LEAST_SHARED_BYTES = 64 * 1024  # of a program: sm_75's and gfx942's
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # computed in float32 inside
DEVICES = ("cpu", "cuda", "mps", "xpu")  # PyTorch operations serve where Triton does not
GUARDS_SCALARS = torch.__version__ >= "2.8"  # before, Dynamo breaks the graph at guard_scalar
LOSS_ADVICE = "Use torch.nn.functional.cross_entropy on logits of your own for that."
LAYER_ADVICE = "Use apply_patch(model, layers=False) for that."
_BATCHED = cast(Any, torch._C)._parse_dispatch_key("Batched")
_MODES_WITHOUT_VALUES = (ProxyTorchDispatchMode, FakeTensorMode)
_TRACING_MODES = (
    *_MODES_WITHOUT_VALUES,
    checkpoint._CachingTorchDispatchMode,
    checkpoint._CachedTorchDispatchMode,
)
_defined: dict[str, str] = {}  # names of operators -> files


def serves_triton(*tensors: Tensor | None) -> bool:
    """Return True if the Triton kernels serve these tensors: their devices and floating dtypes."""
    return all(
        each.dtype in TRITON_DTYPES and serves_triton_device(each)
        for each in tensors
        if each is not None
    )


def serves_triton_device(tensor: Tensor) -> bool:
    """Return True if Triton runs where this tensor is: on a GPU (CUDA or ROCm).

    A tensor of a subclass may have no memory of its own (DTensor), and is left to PyTorch. Under
    TRITON_INTERPRET=1, Triton's own switch, CPU tensors are served too: by Triton's interpreter,
    for tests.
    """
    if not HAS_TRITON or type(tensor) not in (Tensor, Parameter):
        return False
    return tensor.is_cuda or (
        tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    )


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device that runs Triton's kernels."""
    if device.type == "cpu":  # Triton's interpreter
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that one program can have on a device."""
    if device.type == "cpu":  # Triton's interpreter
        return LEAST_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED_BYTES)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that kernels compute in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(device_type: str, operand: torch.dtype | None = None) -> torch.dtype | None:
    """Return the dtype that autocast computes products in now, None where it is off, and for
    operands of float64, which it does not cast.
    """
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta has none
        return None
    if operand == torch.float64:
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_to(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Return a context within which autocast computes products in this dtype; None for no autocast.

    It does nothing where that is so already: torch.export records the states of autocast that a
    call sets, and keeps unused products of another state.
    """
    if autocast_dtype(device_type) == dtype:
        return nullcontext()
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context within which products keep the dtype of their operands."""
    return autocast_to(device_type, None)


def check_plain_tensors(**arguments: object) -> None:
    """Raise ValueError for an argument that is no tensor, or a subclass such as DTensor, which
    holds other tensors instead of numbers. None may be given for what is optional.
    """
    for name, value in arguments.items():
        if value is None and name in ("bias", "class_weight", "token_weight"):
            continue
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")
        if is_traceable_wrapper_subclass(value):
            raise ValueError(
                f"{name} must be a plain tensor, got {type(value).__name__}: pass its local or its "
                "full tensor"
            )
        if value.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got layout {value.layout}")


def check_backward(name: str, *upstream: Tensor | None, advice: str = LOSS_ADVICE) -> None:
    """Raise RuntimeError in a backward pass that is itself recorded (``create_graph=True``), or
    whose upstream gradients are a batch (``is_grads_batched=True``).
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} has no second derivative: backward with create_graph=True is not supported. "
            f"{advice}"
        )
    if torch.compiler.is_compiling():  # it batches nothing, and cannot trace dispatch keys
        return
    if any(each is not None and torch._C._dispatch_keys(each).has(_BATCHED) for each in upstream):
        raise RuntimeError(
            f"{name} takes one upstream gradient at a time: is_grads_batched=True is not "
            f"supported. {advice}"
        )


def constant(number: float) -> float:
    """Return the number as an autograd function takes it: with ``dynamic=True`` torch.compile
    traces the floats that modules hold as symbols, which are an error among its arguments.
    """
    return guard_scalar(number) if GUARDS_SCALARS and torch.compiler.is_compiling() else number


def constants(*options: Any) -> tuple[Any, ...]:
    """Return options with each number as an operator takes it, see ``constant``."""
    return tuple(constant(each) if isinstance(each, float) else each for each in options)


def runs_eagerly(function: Function) -> Function:
    """Decorate a function that torch.compile calls as it is, between two graphs of its own."""
    return cast(Function, torch.compiler.disable(function))


def inlined_only(function: Function) -> Function:
    """Decorate a function that torch.compile traces as a part of its callers, and never compiles as
    a frame of its own.
    """
    try:
        from torch._dynamo.eval_frame import skip_code
    except ImportError:  # private
        return function
    skip_code(cast(Any, function).__code__)
    return function


def operator(
    results: Callable[..., object], *, mutates: tuple[str, ...] = ()
) -> Callable[[Function], Function]:
    """Decorate ``name`` or ``_name`` to be the operator ``liger_patch::name``, which torch.compile,
    ``torch.jit.trace`` and dispatch modes (``make_fx``, ``FakeTensorMode``) see and do not look
    into. Elsewhere the function runs as it is, without the dispatcher's microseconds.

    Args:
        results: of the same arguments, without values, for torch.compile.
        mutates: the arguments that it writes to.
    """

    def register(function: Function) -> Function:
        name = function.__name__.lstrip("_")
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        define(name, schema, function, results)

        @functools.wraps(function)
        def call(*arguments: object) -> object:
            if torch.compiler.is_compiling() or _is_watched(arguments):
                return getattr(torch.ops.liger_patch, name)(*arguments)
            return function(*arguments)

        return cast(Function, call)

    return register


def define(
    name: str,
    schema: str,
    function: Callable[..., object],
    results: Callable[..., object],
    *,
    reads_values: bool = False,
) -> bool:
    """Define the operator ``liger_patch::name``; return False where it is defined already.

    Args:
        results: of the same arguments, without values.
        reads_values: whether the host reads values of the device. No CUDA graph can: from torch 2.9
            on, ``mode="reduce-overhead"`` runs the operator between two.
    """
    file = function.__module__.rpartition(".")[2]
    if _defined.get(name) == file:  # imported a second time, through the link at the root
        return False
    _defined[name] = file
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    tags = (unsafe,) if reads_values and unsafe is not None else ()
    torch.library.define(f"liger_patch::{name}", schema, tags=tags)
    # a graph calls the operator of a backward pass with gradients enabled
    torch.library.impl(f"liger_patch::{name}", DEVICES)(torch.no_grad()(function))
    torch.library.register_fake(f"liger_patch::{name}")(results)
    return True


def is_traced() -> bool:
    """Return True if a call becomes a part of a graph: where torch.compile, torch.export or
    ``make_fx`` trace it, where it runs on no values (``FakeTensorMode``), and where selective
    checkpointing chooses what is kept.

    Other dispatch modes count floating-point operations or tensors: they see PyTorch's own.
    """
    return torch.compiler.is_compiling() or in_tracing_mode()


def in_tracing_mode() -> bool:
    """Return True if this thread's calls become a part of a graph, where Dynamo is not what traces
    them. ``is_compiling`` is one flag of all threads.
    """
    return _is_in(_TRACING_MODES)


def is_without_values() -> bool:
    """Return True if the host can read no value of this thread's calls: where ``make_fx`` or
    torch.export records them, and under ``FakeTensorMode``.
    """
    return not torch.compiler.is_dynamo_compiling() and _is_in(_MODES_WITHOUT_VALUES)


def is_plain(tensor: object) -> bool:
    """Return True for a tensor of no subclass, or one that stands for such a tensor where calls
    run without values.
    """
    return type(tensor) in (Tensor, Parameter) or (
        isinstance(tensor, FakeTensor) and is_without_values()
    )


def _is_in(modes: Any) -> bool:
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    return any(isinstance(mode, modes) for mode in _get_current_dispatch_mode_stack())


def is_compiled_here() -> bool:
    """Return ``torch.compiler.is_compiling`` of this thread: that is one flag of all threads."""
    compiler = torch.compiler
    return compiler.is_dynamo_compiling() or (compiler.is_compiling() and in_tracing_mode())


def is_watched_by_dynamo() -> bool:
    """Return True if Dynamo may compile the functions that this thread calls now: within a call of
    a compiled function, also where the graph was broken.
    """
    try:
        return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None  # type: ignore
    except AttributeError:  # private
        return True


def _is_watched(arguments: tuple[object, ...]) -> bool:
    """Return True if something records the operators that run, or runs them without values."""
    if torch._C._len_torch_dispatch_stack() == 0:
        return torch._C._is_tracing()
    # DTensor has rules for PyTorch's operations, of which the functions are made, and not for these
    return not any(hasattr(each, "device_mesh") for each in arguments)
