"""Experts of a mixture: inputs of every form, and what Transformers' loop and PEFT's sum of weights
compute of them.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import layer_checks
import torch
from layer_checks import ACTIVATIONS, SWIGLU, experts
from torch import Tensor

from liger_patch.kernels.expert_steps import Activation, ExpertProjection

FIELDS = ("weight", "bias", "a", "b")
SCALINGS = {"first": 1.5, "last": -0.75}
LIMIT = 8.0  # that no gate comes near: there the slope jumps, and one rounding decides
FORMS = {
    "silu": SWIGLU,
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "interleaved": Activation("silu", is_interleaved=True),
    "clamped": Activation("clamped", limit=LIMIT),
    "clamped, shifted": Activation("clamped", 1.702, LIMIT, 1.0),
    "clamped, interleaved": Activation("clamped", 1.0, LIMIT, 0.0, True),
    "clamped, interleaved, shifted": Activation("clamped", 1.702, LIMIT, 1.0, True),
}


def inputs(
    tokens: int,
    slots: int = 2,
    count: int = 5,
    hidden: int = 24,
    size: int = 40,
    *,
    ranks: tuple[int, int] = (4, 3),
    bias: bool = False,
    is_transposed: bool = False,
) -> dict[str, Tensor]:
    """Tensors by name, in float32; ``ranks`` of 0 for no adapter. The last expert but one has no
    rows, and the first one many. Biases lift some features far over LIMIT, and some under.
    """

    def numbers(*shape: int, divisor: float) -> Tensor:
        return torch.randn(shape) / math.sqrt(divisor)

    chances = torch.arange(count, 0, -1).float()
    if count > slots:
        chances[-2] = 0.0
    drawn = [torch.multinomial(chances, slots) for _ in range(tokens)]
    found = {
        "x": torch.randn(tokens, hidden),
        "index": torch.stack(drawn) if drawn else torch.empty(0, slots, dtype=torch.long),
        "weights": torch.rand(tokens, slots) + 0.1,
    }
    for name, rank, source, out in (
        ("first", ranks[0], hidden, 2 * size),
        ("last", ranks[1], size, hidden),
    ):
        weight = numbers(count, source, out, divisor=source)
        if is_transposed:  # in memory (E, out, in), as most models have it
            weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
        found[f"{name}.weight"] = weight
        if bias:
            found[f"{name}.bias"] = numbers(count, out, divisor=4)
            if name == "first":
                lifted = 2.5 * LIMIT * torch.tensor([0.0, 0.0, 1.0, 0.0, -1.0])
                found["first.bias"] += lifted.repeat(-(-out // 5))[:out]
        if rank:
            found[f"{name}.a"] = numbers(count, rank, source, divisor=source)
            found[f"{name}.b"] = numbers(count, out, rank, divisor=rank)
    return found


def of_projections(function: Callable[..., Tensor], activation: Activation) -> Any:
    """A function of projections as one of tensors by name."""

    def call(x: Tensor, index: Tensor, weights: Tensor, **tensors: Tensor) -> Tensor:
        first, last = (
            ExpertProjection(
                *(tensors.get(f"{name}.{field}") for field in FIELDS),  # type: ignore[arg-type]
                scaling=SCALINGS[name],
            )
            for name in SCALINGS
        )
        return function(x, index.long(), weights, first, last, activation=activation)

    return call


def eager_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    first: ExpertProjection,
    last: ExpertProjection,
    *,
    activation: Activation,
) -> Tensor:
    """As Transformers loops over experts, with weights to which PEFT has added the adapters."""
    y = torch.zeros_like(x)
    for expert in range(len(first.weight)):
        token, slot = torch.where(index == expert)
        h = _activated(_product(x[token], first, expert), activation)
        added = _product(h, last, expert) * weights[token, slot, None]
        y = y.index_add(0, token, added.to(y.dtype))
    return y


def _product(x: Tensor, part: ExpertProjection, expert: int) -> Tensor:
    weight = part.weight[expert]
    if part.a is not None:
        weight = weight + (part.b[expert] @ part.a[expert]).t() * part.scaling
    y = x @ weight
    return y if part.bias is None else y + part.bias[expert]


def _activated(gate_up: Tensor, how: Activation) -> Tensor:
    if how.is_interleaved:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    else:
        gate, up = gate_up.chunk(2, -1)
    if how.name != "clamped":
        return ACTIVATIONS[how.name](gate) * up
    gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
    return gate * torch.sigmoid(gate * how.alpha) * (up + how.shift)


def calls(activation: Activation = SWIGLU, slice_tokens: int | None = None) -> tuple[Any, Any]:
    """The operator and eager, as functions of tensors by name."""
    ours = partial(experts, slice_tokens=slice_tokens)
    return tuple(of_projections(each, activation) for each in (ours, eager_experts))  # type: ignore[return-value]


def check(
    tensors: Mapping[str, Tensor],
    activation: Activation = SWIGLU,
    *,
    slice_tokens: int | None = None,
    **how: Any,
) -> dict[str, Tensor | None]:
    """Hold the operator to the rule; return its results. ``how`` as of ``layer_checks.check``."""
    frozen = {"index", *how.pop("frozen", ())}
    return layer_checks.check(*calls(activation, slice_tokens), tensors, frozen=frozen, **how)
