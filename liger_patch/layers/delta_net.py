"""Gated delta nets on kernels, which are layers of linear attention.

A layer's own code runs, with other functions in the place of those that Transformers falls back to
without flash-linear-attention and causal-conv1d: globals of the layer's module. Functions of those
libraries stay where they train right, and so do layers of Transformers 5.0, which hold theirs as
attributes.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from liger_patch.kernels.backend import is_hopper
from liger_patch.kernels.causal_conv import ACTIVATIONS, run_causal_conv
from liger_patch.kernels.delta_rule import run_gated_delta_rule
from liger_patch.kernels.graphs import is_compiled_here
from liger_patch.layers.checks import (
    is_left_to_model,
    layers_of,
    names_of,
    needs_own_code,
    results_match,
)
from liger_patch.layers.other_globals import decorated_again, with_other_globals
from liger_patch.subclass import is_transformers

RULE, CONV = "torch_chunk_gated_delta_rule", "causal_conv1d_fn"  # the globals
CACHES = "cache", "cache_params", "past_key_values"  # arguments of forward
PROBED_TOKENS, PROBED_HEADS, PROBED_SIZE = 5, 2, 4


def is_delta_net(module: Any) -> bool:
    """Return whether a module is a gated delta net that kernels serve.

    They do not where its functions are those of a library that trains right or compute something
    else, and where its code is not Transformers' own.
    """
    own = type(module).forward
    if not is_transformers(own) or decorated_again(own, inspect.unwrap(own)) is None:
        return False
    functions = _own_functions(module)
    return RULE in functions and _agree(functions)


def delta_net_configuration(module: nn.Module) -> Hashable:
    """Return the key under which recurrent layers share one class: of gated delta nets, it has the
    functions that are not a library's.
    """
    return type(module), tuple(_own_functions(module))


def of_libraries(model: nn.Module) -> Counter[str]:
    """Return how many gated delta nets run a library's rule, by the name of the library."""
    found: Counter[str] = Counter()
    for module in model.modules():
        if type(module).__name__.endswith("GatedDeltaNet") and "delta_net" not in layers_of(module):
            library = _library_of(inspect.unwrap(type(module).forward).__globals__.get(RULE))
            if library not in ("", "transformers"):
                found[library] += 1
    return found


def _own_functions(module: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions of a layer that kernels may replace, by the names of the globals."""
    names = names_of(type(module))
    found = inspect.unwrap(type(module).forward).__globals__
    return {n: found[n] for n in (RULE, CONV) if n in names and _is_replaced(found.get(n))}


def _is_replaced(function: Any) -> bool:
    return _is_fallback(function) or _cannot_train(function)


def _is_fallback(function: Any) -> bool:
    """Return whether a function is PyTorch's operations in Transformers, and not what it has found
    in a library: its decorator holds that, beside the function in its place.
    """
    return all(inspect.isfunction(f) and is_transformers(f) for f in (function, _held(function)))


def _cannot_train(function: Any) -> bool:
    """Return whether a function is flash-linear-attention's on a Hopper GPU with Triton 3.4 to
    3.7.0: its gradients are wrong there, or an error. Its 0.5 refuses newer Tritons too.

    Source: https://github.com/fla-org/flash-linear-attention/issues/640
    """
    if _library_of(function) != "fla":
        return False
    import triton  # as that package does

    is_mended = getattr(sys.modules.get("fla.utils"), "TRITON_ABOVE_3_7_1", False)
    is_hit = Version(triton.__version__) >= Version("3.4") and not is_mended
    return is_hit and is_hopper(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _library_of(function: Any) -> str:
    return (getattr(_held(function), "__module__", None) or "").partition(".")[0]


def _held(function: Any) -> Any:
    """Return what Transformers' decorator of a function calls in its place, or the function."""
    if not inspect.isfunction(function):
        return function
    return inspect.getclosurevars(function).nonlocals.get("implementation", function)


def delta_net_forward(original: Any) -> Any:
    """Return the forward of a class of gated delta nets that calls the kernels.

    Its ``keeps_apart`` says whether a call on hidden states keeps sequences apart.
    """
    own = inspect.unwrap(original.forward)
    functions = {name: own.__globals__[name] for name in names_of(original) & WAYS.keys()}
    values = {name: WAYS[name](f) for name, f in functions.items() if _is_replaced(f)}
    forward = _with_globals(own, values)
    if values.keys() == WAYS.keys():
        vars(forward)["keeps_apart"] = lambda *call: not _is_left(call, {})
    return decorated_again(original.forward, forward)


def _with_globals(function: Any, values: dict[str, Any]) -> Any:
    other, look_up = with_other_globals(function, values)

    @functools.wraps(function)
    def forward(*arguments: Any, **options: Any) -> Any:
        if is_compiled_here():  # Dynamo guards the globals that it has found
            return other(*arguments, **options)
        if _is_left(arguments, options):
            return function(*arguments, **options)
        look_up()
        return other(*arguments, **options)

    vars(forward)["look_up"] = look_up
    return forward


def _is_left(arguments: tuple, options: dict[str, Any]) -> bool:
    """Return whether a call runs the layer's own code: where it has a cache too, whose states its
    functions know.
    """
    layer, *others = arguments
    if len(others) > 1 or any(options.get(name) is not None for name in CACHES):
        return True
    x = others[0] if others else options.get("hidden_states")
    return is_left_to_model(layer, x) or needs_own_code(x)


def _rule_or_own(own: Any) -> Callable[..., Any]:
    """Return a function that calls the kernels if they serve the arguments, else ``own``."""

    @functools.wraps(own)
    def rule(query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **options: Any):
        tensors, cu_seqlens = (query, key, value, g, beta), options.get("cu_seqlens")
        has_states = options.get("initial_state") is not None or options.get("output_final_state")
        is_known = cu_seqlens is None or len(query) == 1
        if has_states or not is_known or needs_own_code(*tensors):
            return own(query, key, value, g=g, beta=beta, **options)
        ids = _ids(options, query.shape[:2])
        if cu_seqlens is not None:
            place = torch.arange(query.shape[1], device=query.device)
            ids = torch.searchsorted(cu_seqlens.to(place.dtype), place, right=True)[None]
        normalize = options.get("use_qk_l2norm_in_kernel", False)
        return run_gated_delta_rule(*tensors, ids, query.shape[-1] ** -0.5, normalize), None

    return rule


def _ids(options: dict[str, Any], shape: torch.Size) -> Tensor | None:
    """Return ``seq_idx`` of a call, whoever calls the model; raise ValueError unless it fits."""
    ids = options.get("seq_idx")
    if ids is not None and (ids.shape != shape or ids.dtype not in (torch.int32, torch.int64)):
        given = f"{ids.dtype} {tuple(ids.shape)}"
        raise ValueError(f"seq_idx must be int32 or int64 {tuple(shape)}, got {given}")
    return ids


def _conv_or_own(own: Any) -> Callable[..., Any]:
    @functools.wraps(own)
    def conv(
        hidden_states: Tensor,  # (B, C, T)
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **options: Any,
    ) -> Tensor:
        if activation not in ACTIVATIONS or needs_own_code(hidden_states, weight, bias):
            return own(hidden_states, weight, bias, activation, **options)
        x = hidden_states.transpose(1, 2)
        return run_causal_conv(x, weight, bias, _ids(options, x.shape[:2]), activation).mT

    return conv


def _agree(functions: dict[str, Any]) -> bool:
    """Return whether a layer's functions compute what the kernels do, on a small input."""
    shape = 1, PROBED_TOKENS, PROBED_HEADS

    def results(functions: dict[str, Any]) -> list[Tensor]:
        count = torch.arange(PROBED_TOKENS * PROBED_HEADS * PROBED_SIZE, dtype=torch.float32)
        q, k, v = ((count * step).sin().view(*shape, -1) for step in (0.7, 1.1, 1.3))
        g, beta = -v[..., 0].abs(), k[..., 1].sigmoid()
        found = [functions[RULE](q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]]
        if CONV in functions:
            found.append(functions[CONV](q.flatten(2).mT, k[0].flatten(1).mT, None, "silu"))
        return found

    ours = {name: WAYS[name](function) for name, function in functions.items()}
    # what a library cannot compute here, Transformers' own function says
    own = {n: inspect.unwrap(f) if _cannot_train(f) else f for n, f in functions.items()}
    return results_match(lambda: results(own), lambda: results(ours))


WAYS = {RULE: _rule_or_own, CONV: _conv_or_own}
