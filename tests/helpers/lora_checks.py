"""LoRA operators held to the rule: no worse than PEFT's arithmetic in the same dtypes, measured
against float64.

A gradient is named by its projection's place and field: "0.weight", "1.a".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from exactness import assert_no_worse
from layer_calls import gated_mlp
from layer_checks import ACTIVATIONS
from torch import Tensor
from torch.nn.functional import linear

from liger_patch.kernels.lora.projection import LoraProjection
from liger_patch.kernels.products import QuantizedWeight

Layer = Callable[[Tensor, Sequence[LoraProjection]], tuple[Tensor, ...]]
Results = dict[str, Tensor | None]
FIELDS = ("weight", "bias", "a", "b")
EVERYTHING = r".*"  # that has a gradient
ADAPTERS = r"x|\d\.[ab]"
# dtype of x and the base, that of the adapters, whether autocast to bf16 is on
WAYS = {
    "float64": (torch.float64, torch.float64, False),
    "float32": (torch.float32, torch.float32, False),
    "bfloat16": (torch.bfloat16, torch.bfloat16, False),
    "float16": (torch.float16, torch.float16, False),
    "autocast": (torch.bfloat16, torch.float32, True),
    "autocast of float32": (torch.float32, torch.float32, True),
    "autocast of float64": (torch.float64, torch.float64, True),
}


class Quantized(QuantizedWeight):
    """Of 8-bit numbers, each a multiple of 1 / 64."""

    def __init__(self, weight: Tensor) -> None:
        self.stored = (weight.float() * 64).round().clamp(-127, 127).to(torch.int8)
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device

    def dequantized(self) -> Tensor:
        return self.stored.to(self.dtype) / 64


def projection(
    size: int,
    hidden_size: int,
    rank: int,
    *,
    dtype: torch.dtype,
    adapters: torch.dtype | None = None,
    bias: bool = False,
    device: Any = "cpu",
    scaling: float = 1.5,
    dropout: float = 0.0,
    quantized: bool = False,
) -> LoraProjection:
    """Of random numbers, whose adapter adds about as much as the base gives."""

    def numbers(*shape: int, dtype: torch.dtype, divisor: float) -> Tensor:
        return (torch.randn(shape) / divisor).to(device, dtype)

    width, adapters = math.sqrt(hidden_size), adapters or dtype
    weight: Any = numbers(size, hidden_size, dtype=dtype, divisor=width)
    return LoraProjection(
        Quantized(weight) if quantized else weight,
        numbers(size, dtype=dtype, divisor=2.0) if bias else None,
        numbers(rank, hidden_size, dtype=adapters, divisor=width),
        numbers(size, rank, dtype=adapters, divisor=math.sqrt(rank)),
        scaling,
        dropout,
    )


def dense(weight: Any) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantized()


def eager_linear(x: Tensor, part: LoraProjection) -> Tensor:
    """As PEFT's layer has it."""
    y = linear(x, dense(part.weight), part.bias)
    added = linear(linear(x.to(part.a.dtype), part.a), part.b) * part.scaling
    return (y + added).to(y.dtype)


def eager_linears(x: Tensor, parts: Sequence[LoraProjection]) -> tuple[Tensor, ...]:
    return tuple(eager_linear(x, part) for part in parts)


def eager_mlp(activation: str) -> Layer:
    act = ACTIVATIONS[activation]

    def layer(x: Tensor, parts: Sequence[LoraProjection]) -> tuple[Tensor]:
        gate, up, down = parts
        return (eager_linear(act(eager_linear(x, gate)) * eager_linear(x, up), down),)

    return layer


def our_mlp(activation: str) -> Layer:
    return lambda x, parts: (gated_mlp(x, *parts, activation=activation),)


class Wide(QuantizedWeight):
    """In float64."""

    def __init__(self, weight: Any) -> None:
        self._weight, self.shape = weight, weight.shape

    def dequantized(self) -> Tensor:
        return self._weight.dequantized().double()


def widened(part: LoraProjection) -> LoraProjection:
    """In float64."""
    tensors = {n: getattr(part, n) for n in FIELDS if isinstance(getattr(part, n), Tensor)}
    wide: dict[str, Any] = {name: value.double() for name, value in tensors.items()}
    if "weight" not in wide:
        wide["weight"] = Wide(part.weight)
    return part._replace(**wide)


def trainable(
    x: Tensor, parts: Sequence[LoraProjection], wanted: str = ADAPTERS
) -> tuple[dict[str, Tensor], list[LoraProjection]]:
    """Return leaves by name, "x" first, and the projections of them. Names that match ``wanted``
    take a gradient.
    """
    leaves, given = {"x": x.detach()}, []
    for i, part in enumerate(parts):
        tensors = {n: getattr(part, n) for n in FIELDS if isinstance(getattr(part, n), Tensor)}
        tensors = {name: value.detach() for name, value in tensors.items()}
        leaves |= {f"{i}.{name}": value for name, value in tensors.items()}
        given.append(part._replace(**tensors))
    for name, value in leaves.items():
        value.requires_grad_(re.fullmatch(wanted, name) is not None)
    return leaves, given


def results(
    layer: Layer,
    x: Tensor,
    parts: Sequence[LoraProjection],
    *,
    wanted: str = ADAPTERS,
    autocast: bool = False,
    unused: Collection[int] = (),
    upstream_dtype: torch.dtype | None = None,
) -> Results:
    """Return outputs and gradients by name; None of what takes none.

    Args:
        wanted: pattern of the names that take a gradient.
        autocast: whether the forward pass runs under autocast to bf16.
        unused: outputs that get no upstream gradient.
        upstream_dtype: whose values the upstream gradients have; by default that of the outputs.
    """
    leaves, parts = trainable(x, parts, wanted)
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        ys = layer(leaves["x"], parts)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(y.shape, generator=generator).to(y.device) for y in ys]
    upstream = [
        u.to(upstream_dtype or y.dtype).to(y.dtype) for u, y in zip(upstream, ys, strict=True)
    ]
    used = [i for i, y in enumerate(ys) if i not in unused and y.requires_grad]
    torch.autograd.backward([ys[i] for i in used], [upstream[i] for i in used])
    found: Results = {f"y {i}": y.detach() for i, y in enumerate(ys)}
    return found | {name: value.grad for name, value in leaves.items()}


def check(
    ours: Layer,
    eager: Layer,
    x: Tensor,
    parts: Sequence[LoraProjection],
    *,
    eps: int = 1,
    **how: Any,
) -> Results:
    """Hold ours to the rule, with so many ``eps``, dtypes included; return our results. ``how`` as
    of ``results``.
    """
    plain = results(eager, x, parts, **how)
    our = results(ours, x, parts, **how)
    for name, value in plain.items():
        got = our[name]
        assert (got is None) == (value is None), name
        if value is not None and got is not None:
            assert (got.dtype, got.shape) == (value.dtype, value.shape), name
    product = plain["y 0"]
    assert product is not None
    how |= {"autocast": False, "upstream_dtype": product.dtype}
    truth = results(eager, x.double(), [widened(part) for part in parts], **how)
    if product.dtype == torch.float64:
        torch.testing.assert_close(our, truth)
    else:
        assert_no_worse(our, plain, truth, product.dtype, eps=eps)
    return our
