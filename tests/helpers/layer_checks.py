"""Layers' operators: called with tensors, with products in autocast's dtype, and held to the rule:
results and every gradient against float64, no worse than eager's.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from exactness import assert_no_worse
from torch import Tensor
from torch.nn.functional import gelu, silu

from liger_patch.kernels.backend import autocast_dtype
from liger_patch.kernels.causal_conv import run_causal_conv
from liger_patch.kernels.delta_rule import run_gated_delta_rule
from liger_patch.kernels.expert_steps import Activation, ExpertProjection
from liger_patch.kernels.experts import run_experts
from liger_patch.kernels.gated import run_gated
from liger_patch.kernels.gated_mlp import run_gated_mlp
from liger_patch.kernels.gated_norm import run_gated_norm
from liger_patch.kernels.lora.linears import run_lora_linears
from liger_patch.kernels.lora.projection import LoraProjection, without_adapter
from liger_patch.kernels.rms_norm import run_rms_norm

Layer = Callable[..., Tensor | tuple[Tensor, ...]]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": lambda x: gelu(x, approximate="tanh"),
    "gelu": gelu,
}
SWIGLU = Activation()


def dtype_of_products(x: Tensor) -> torch.dtype:
    return autocast_dtype(x.device.type, x.dtype) or x.dtype


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return run_rms_norm(x, weight, eps, offset, dtype or x.dtype)


def gated(gate: Tensor, up: Tensor | None = None, *, activation: str = "silu") -> Tensor:
    return run_gated(gate, up, activation)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    sequence_ids: Tensor | None = None,
) -> Tensor:
    return run_causal_conv(x, weight, bias, sequence_ids, activation)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    normalize: bool = False,
    sequence_ids: Tensor | None = None,
) -> Tensor:
    return run_gated_delta_rule(q, k, v, g, beta, sequence_ids, q.shape[-1] ** -0.5, normalize)


def gated_mlp(
    x: Tensor,
    gate: Any,
    up: Any,
    down: Any,
    *,
    activation: str = "silu",
    slice_tokens: int | None = None,
) -> Tensor:
    parts: Any = [
        each if each is None or isinstance(each, LoraProjection) else without_adapter(each)
        for each in (gate, up, down)
    ]
    return run_gated_mlp(x, *parts, dtype_of_products(x), activation, slice_tokens)


def lora_linears(x: Tensor, projections: Sequence[LoraProjection]) -> tuple[Tensor, ...]:
    return run_lora_linears(x, projections, dtype_of_products(x), None)


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    first: ExpertProjection,
    last: ExpertProjection,
    *,
    activation: Activation = SWIGLU,
    slice_tokens: int | None = None,
) -> Tensor:
    how = activation, dtype_of_products(x), slice_tokens
    return run_experts(x, index, weights, first, last, *how)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group_size: int | None = None,
    activation: str = "silu",
    gate_first: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    how = group_size or x.shape[-1], activation, gate_first, dtype or x.dtype
    return run_gated_norm(x, gate, weight, eps, *how)


def results_and_gradients(
    function: Layer,
    inputs: Mapping[str, Tensor],
    frozen: Collection[str] = (),
    view: Callable[[Tensor], Tensor] = lambda upstream: upstream,
    *,
    autocast: bool = False,
    unused: Collection[int] = (),
    upstream_dtype: torch.dtype | None = None,
) -> dict[str, Tensor | None]:
    """By name, of upstream gradients that are the same for all of one shape, seen by ``view``.

    Args:
        frozen: inputs that take no gradient.
        autocast: whether the forward pass runs under autocast to bf16.
        unused: results that get no upstream gradient.
        upstream_dtype: whose values the upstream gradients have; by default that of the results.
    """
    leaves = {name: value.detach() for name, value in inputs.items()}
    for name in leaves.keys() - set(frozen):
        leaves[name].requires_grad_()
    device = next(iter(leaves.values())).device
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        results = function(**leaves)
    results = (results,) if isinstance(results, Tensor) else results
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(r.shape, generator=generator).to(device) for r in results]
    pairs = [
        (r, view(u.to(upstream_dtype or r.dtype).to(r.dtype)))
        for i, (r, u) in enumerate(zip(results, upstream, strict=True))
        if r.requires_grad and i not in unused
    ]
    torch.autograd.backward(*zip(*pairs, strict=True))
    named = {f"result {i}": r.detach() for i, r in enumerate(results)}
    return named | {name: leaf.grad for name, leaf in leaves.items()}


def check(
    ours: Layer,
    eager: Layer,
    inputs: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    eps: int = 1,
    autocast: bool = False,
    upstream_dtype: torch.dtype | None = None,
    **how: Any,
) -> dict[str, Tensor | None]:
    """Hold ours to the rule; return our results. The truth is what eager computes in float64.

    Args:
        dtype, eps: as of ``assert_no_worse``; by default the dtype of the first input.
        autocast: of ours and of eager.
        upstream_dtype: of the truth, and
        how: as of ``results_and_gradients``.
    """
    dtype = dtype or next(iter(inputs.values())).dtype
    our, plain = (
        results_and_gradients(each, inputs, autocast=autocast, **how) for each in (ours, eager)
    )
    wide = {n: v.double() if v.is_floating_point() else v for n, v in inputs.items()}
    how["upstream_dtype"] = upstream_dtype
    exact = results_and_gradients(eager, wide, **how)
    for name, value in plain.items():
        got = our[name]
        assert (got is None) == (value is None), name
        if value is not None and got is not None:
            assert (got.dtype, got.shape) == (value.dtype, value.shape), name
    if dtype == torch.float64:
        torch.testing.assert_close(our, exact)
    else:
        assert_no_worse(our, plain, exact, dtype, eps=eps)
    return our


def as_of(module: str, function: Any) -> Any:
    """The function as if this module had defined it."""
    own = {**function.__globals__, "__name__": module}
    return types.FunctionType(function.__code__, own, closure=function.__closure__)
