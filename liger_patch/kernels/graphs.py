"""What the graphs of ``torch.compile``, ``torch.export`` and ``make_fx`` need of functions that
launch kernels; and calls without values, under ``FakeTensorMode``.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Function = TypeVar("Function", bound=Callable)
GUARDS_SCALARS = torch.__version__ >= "2.8"  # before, Dynamo breaks the graph at guard_scalar
_MODES_WITHOUT_VALUES = (ProxyTorchDispatchMode, FakeTensorMode)
_TRACING_MODES = (
    *_MODES_WITHOUT_VALUES,
    checkpoint._CachingTorchDispatchMode,
    checkpoint._CachedTorchDispatchMode,
)
# sets Dynamo's callback of this thread, and returns the one before. It is private, the same from
# torch 2.6 to 2.13; without it, a compiled call with labels compiles nothing
SET_CALLBACK = getattr(cast(Any, torch._C)._dynamo.eval_frame, "set_eval_frame", None)
_thread = threading.local()  # whether it runs ``between_graphs``


def constants(*options: Any) -> tuple[Any, ...]:
    """Return options with each number as one that can be compared: with ``dynamic=True``
    torch.compile traces the floats that modules hold as symbols.
    """
    if not (GUARDS_SCALARS and torch.compiler.is_compiling()):
        return options
    return tuple(guard_scalar(each) if isinstance(each, float) else each for each in options)


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
    set_callback = SET_CALLBACK
    if set_callback is None:
        return runs_eagerly(function)(*arguments, lambda inner: inner)
    before = getattr(_thread, "is_between_graphs", False)
    callback, _thread.is_between_graphs = set_callback(None), True

    def compiled(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            set_callback(callback)
            try:
                return inner(*args, **options)
            finally:
                set_callback(None)

        return call

    try:
        return function(*arguments, compiled)
    finally:
        _thread.is_between_graphs = before
        set_callback(callback)


def is_in_compiled_call() -> bool:
    """Return True where torch.compile traces, and within ``between_graphs``."""
    return torch.compiler.is_compiling() or getattr(_thread, "is_between_graphs", False)


def operator(
    results: Callable[..., object],
    *,
    mutates: tuple[str, ...] = (),
    schema: str | None = None,
    reads_values: bool = False,
) -> Callable[[Function], Function]:
    """Decorate ``name`` or ``_name`` to be the operator ``liger_patch::name``, which torch.compile,
    ``torch.jit.trace`` and dispatch modes (``make_fx``, ``FakeTensorMode``) see and do not look
    into. Elsewhere the function runs as it is, without the 22 us of ``custom_op``.

    Gradients of its results are an error, unless it is made ``differentiable``.

    Args:
        results: a function of the same arguments that returns empty results, for tracing.
        mutates: the arguments that it writes to.
        schema: of the operator; by default that of the function's annotations.
        reads_values: whether the host reads values of the device. No CUDA graph can: from torch 2.9
            on, ``mode="reduce-overhead"`` runs the operator between two.
    """
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    tags: dict[str, Any] = {"tags": (unsafe,)} if reads_values and unsafe is not None else {}

    def register(function: Function) -> Function:
        name = function.__name__.lstrip("_")
        torch.library.custom_op(
            f"liger_patch::{name}", function, mutates_args=mutates, schema=schema, **tags
        ).register_fake(results)

        @functools.wraps(function)
        def call(*arguments: object, **options: object) -> object:
            if sees_operators(arguments):
                return getattr(torch.ops.liger_patch, name)(*arguments, **options)
            return function(*arguments, **options)

        return cast(Function, call)

    return register


def differentiable(
    call: Callable[..., Any],
    save: Callable[..., None],
    backward: Callable[..., Any],
    *,
    first_alone: bool = False,
) -> Callable[..., Any]:
    """Return an operator's function with gradients: an autograd function, and where ``operator``
    sees a graph, the operator itself.

    Args:
        call: what ``operator`` returned.
        save: what the backward pass needs, called with its context, the arguments and the results.
        backward: of an autograd function.
        first_alone: whether only the first of several results is returned. Others have no gradient.
    """
    function = inspect.unwrap(call)
    name = function.__name__.lstrip("_")

    def forward(ctx: Any, *inputs: Any) -> Any:
        results = function(*inputs)
        save(ctx, inputs, results)
        return results[0] if first_alone else results

    def save_results(ctx: Any, inputs: tuple, output: Any) -> None:
        if first_alone:
            ctx.mark_non_differentiable(*output[1:])
        save(ctx, inputs, output)

    def of_results(ctx: Any, *upstream: Tensor) -> Any:
        return backward(ctx, *upstream[:1] if first_alone else upstream)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    eager: Any = type(name, (torch.autograd.Function,), methods)
    torch.library.register_autograd(f"liger_patch::{name}", of_results, setup_context=save_results)

    def apply(*inputs: Any) -> Any:
        if not sees_operators(inputs):
            return eager.apply(*inputs)
        results = call(*inputs)
        return results[0] if first_alone else results

    return apply


def is_traced() -> bool:
    """Return True if a call becomes a part of a graph: where torch.compile, torch.export or
    ``make_fx`` trace it, where it runs on no values (``FakeTensorMode``), and where selective
    checkpointing chooses what is kept.

    Other dispatch modes count floating-point operations or tensors: they see PyTorch's own.
    """
    return torch.compiler.is_compiling() or (
        torch._C._len_torch_dispatch_stack() > 0 and in_tracing_mode()
    )


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
    """Return True if this thread is traced: ``is_compiling`` is one flag of all threads."""
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


def sees_operators(arguments: tuple[object, ...]) -> bool:
    """Return True if a call of these arguments becomes a part of a graph, or is seen by a dispatch
    mode.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    # DTensor dispatches PyTorch's operations and not ours, so let it see those
    return torch._C._len_torch_dispatch_stack() > 0 and not any(
        hasattr(each, "device_mesh") for each in arguments
    )
