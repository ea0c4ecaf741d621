"""Layers held to the rule: results and every gradient against float64, no worse than eager's."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from exactness import assert_no_worse
from torch import Tensor
from torch.nn.functional import gelu, silu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "gelu": gelu,
}


def results_and_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Mapping[str, Tensor],
    frozen: Collection[str] = (),
    view: Callable[[Tensor], Tensor] = lambda upstream: upstream,
) -> dict[str, Tensor | None]:
    """By name, of upstream gradients that are the same for all of one shape, seen by ``view``."""
    leaves = {name: value.detach() for name, value in inputs.items()}
    for name in leaves.keys() - set(frozen):
        leaves[name].requires_grad_()
    results = function(**leaves)
    results = (results,) if isinstance(results, Tensor) else results
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(r.shape, generator=generator).to(r.device, r.dtype) for r in results]
    used = [(r, view(u)) for r, u in zip(results, upstream, strict=True) if r.requires_grad]
    torch.autograd.backward(*zip(*used, strict=True))
    named = {f"result {i}": r.detach() for i, r in enumerate(results)}
    return named | {name: leaf.grad for name, leaf in leaves.items()}


def check(
    ours: Callable[..., Tensor | tuple[Tensor, ...]],
    eager: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Mapping[str, Tensor],
    *,
    eps: int = 1,
    **how: Any,
) -> None:
    """Hold ours to the rule; the truth is what eager computes in float64. ``eps`` as of
    ``assert_no_worse``, ``how`` as of ``results_and_gradients``.
    """
    dtype = next(iter(inputs.values())).dtype
    our = results_and_gradients(ours, inputs, **how)
    plain = results_and_gradients(eager, inputs, **how)
    truth = results_and_gradients(eager, {k: v.double() for k, v in inputs.items()}, **how)
    for name, value in plain.items():
        got = our[name]
        assert (got is None) == (value is None), name
        if value is not None:
            assert (got.dtype, got.shape) == (value.dtype, value.shape), name
    if dtype == torch.float64:
        torch.testing.assert_close(our, truth)
    else:
        assert_no_worse(our, plain, truth, dtype, eps=eps)


def as_of(module: str, function: Any) -> Any:
    """The function as if this module had defined it."""
    own = {**function.__globals__, "__name__": module}
    return types.FunctionType(function.__code__, own, closure=function.__closure__)
