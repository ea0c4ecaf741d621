"""What graphs need of functions that launch kernels, those of ``torch.compile``, ``torch.export``
and ``make_fx``; and calls without values, under ``FakeTensorMode``.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Function = TypeVar("Function", bound=Callable)
DEVICES = ("cpu", "cuda", "mps", "xpu")  # PyTorch operations serve where Triton does not
GUARDS_SCALARS = torch.__version__ >= "2.8"  # before, Dynamo breaks the graph at guard_scalar
_MODES_WITHOUT_VALUES = (ProxyTorchDispatchMode, FakeTensorMode)
_TRACING_MODES = (
    *_MODES_WITHOUT_VALUES,
    checkpoint._CachingTorchDispatchMode,
    checkpoint._CachedTorchDispatchMode,
)
_defined: dict[str, str] = {}  # names of operators -> files
_differentiable: set[str] = set()  # names of operators
_thread = threading.local()  # whether it runs ``between_graphs``


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


@torch.compiler.disable(recursive=False)
def between_graphs(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function within a call of a compiled one, so that torch.compile breaks the graph here,
    once, and compiles nothing of it but what the last argument decorates.

    Args:
        function: takes the arguments, and then a decorator of what is to be compiled.
    """
    eval_frame = cast(Any, torch._C)._dynamo.eval_frame  # private, the same from torch 2.6 on
    before = getattr(_thread, "is_between_graphs", False)
    callback, _thread.is_between_graphs = eval_frame.set_eval_frame(None), True

    def compiled(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            eval_frame.set_eval_frame(callback)
            try:
                return inner(*args, **options)
            finally:
                eval_frame.set_eval_frame(None)

        return call

    try:
        return function(*arguments, compiled)
    finally:
        _thread.is_between_graphs = before
        eval_frame.set_eval_frame(callback)


def is_in_compiled_call() -> bool:
    """Return True where torch.compile traces, and within ``between_graphs``."""
    return torch.compiler.is_compiling() or getattr(_thread, "is_between_graphs", False)


def operator(
    results: Callable[..., object], *, mutates: tuple[str, ...] = (), is_backward: bool = False
) -> Callable[[Function], Function]:
    """Decorate ``name`` or ``_name`` to be the operator ``liger_patch::name``, which torch.compile,
    ``torch.jit.trace`` and dispatch modes (``make_fx``, ``FakeTensorMode``) see and do not look
    into. Elsewhere the function runs as it is, without the dispatcher's microseconds.

    Args:
        results: of the same arguments, without values, for torch.compile.
        mutates: the arguments that it writes to.
        is_backward: see ``define``.
    """

    def register(function: Function) -> Function:
        name = function.__name__.lstrip("_")
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        define(name, schema, function, results, is_backward=is_backward)

        @functools.wraps(function)
        def call(*arguments: object) -> object:
            if torch.compiler.is_compiling() or torch._C._is_tracing():
                return getattr(torch.ops.liger_patch, name)(*arguments)
            if torch._C._len_torch_dispatch_stack() > 0 and _sees_operators(arguments):
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
    is_backward: bool = False,
) -> bool:
    """Define the operator ``liger_patch::name``; return False where it is defined already.

    Args:
        results: of the same arguments, without values.
        reads_values: whether the host reads values of the device. No CUDA graph can: from torch 2.9
            on, ``mode="reduce-overhead"`` runs the operator between two.
        is_backward: whether it computes gradients. A graph of a training step holds it, and cannot
            be differentiated again: that is an error.
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
    if is_backward:

        def refuse(*_: Any) -> None:
            refuse_second_derivative(name)

        torch.library.register_autograd(f"liger_patch::{name}", refuse)
    return True


def refuse_second_derivative(name: str) -> NoReturn:
    """Raise RuntimeError: gradients that ``liger_patch::name`` computed in a recorded training step
    are differentiated.
    """
    raise RuntimeError(
        f"liger_patch::{name} has no second derivative: a recorded backward pass cannot be "
        "differentiated again. Run the recorded step under torch.no_grad(). For second "
        "derivatives, record them too, with layers=False and LIGER_PATCH_RETURN_LOGITS=1, or with "
        "torch.nn.functional.cross_entropy on logits of your own"
    )


def differentiable(
    name: str, function: Any, save: Callable[..., None], *, returned: int = 1
) -> None:
    """Give the operator ``liger_patch::name`` the backward pass of the autograd function around it.

    ``torch.export`` and ``make_fx`` record the operator in a forward pass, and not the autograd
    function: without this, what they record would train without its gradients. It is registered
    once the autograd function is there, behind ``operator``.

    Args:
        function: the autograd function. It takes the arguments of the operator.
        save: what its forward saves, called with its context, its arguments and the results.
        returned: how many of the operator's results the function returns. Others have no gradient.
    """
    if name in _differentiable:  # imported a second time, through the link at the root
        return
    _differentiable.add(name)

    def save_results(ctx: Any, inputs: tuple, output: Any) -> None:
        results = (output,) if isinstance(output, Tensor) else output
        ctx.mark_non_differentiable(*results[returned:])
        save(ctx, inputs, results)

    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return function.backward(ctx, *upstream[:returned])

    torch.library.register_autograd(f"liger_patch::{name}", backward, setup_context=save_results)


def is_traced() -> bool:
    """Return True if a call becomes a part of a graph: where torch.compile, torch.export or
    ``make_fx`` trace it, where it runs on no values (``FakeTensorMode``), and where selective
    checkpointing chooses what is kept.

    Other dispatch modes count floating-point operations or tensors: they see PyTorch's own.
    """
    return torch.compiler.is_compiling() or in_tracing_mode()


def is_exporting() -> bool:
    """Return True if torch.export traces the call. torch 2.6 does not tell."""
    # not torch.compiler.is_exporting(), which Dynamo of torch 2.11 takes for True in each graph
    return getattr(torch.compiler, "_is_exporting_flag", False)


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


def _sees_operators(arguments: tuple[object, ...]) -> bool:
    """Return True if a dispatch mode records operators of these arguments, or runs them without
    values.
    """
    # DTensor dispatches PyTorch's operations and not ours, so let it see those
    return not any(hasattr(each, "device_mesh") for each in arguments)
