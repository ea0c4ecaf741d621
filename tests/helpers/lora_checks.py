"""Random inputs of LoRA operators, and these held to the rule: no worse than PEFT's arithmetic in
the same dtypes, measured against float64.

A gradient is named by its projection's place and field: "0.weight", "1.a".
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import layer_checks
import torch
from layer_checks import ACTIVATIONS, gated_mlp
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

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
HIDDEN, SIZE = 40, 56
SHAPES = {
    "batch": (5, 7, HIDDEN),
    "row": (HIDDEN,),
    "three": (2, 3, 5, HIDDEN),
    "none": (0, HIDDEN),
    "none of a batch": (2, 0, HIDDEN),
}
RANKS = {
    "equal": (16, 16, 16),
    "unequal": (8, 20, 16),
    "of 1": (1, 1, 1),
    "of 64": (64, 1, 33),
    "of 70": (8, 16, 70),  # more than a tile of the Triton form holds
}
# (O, R, whether it has a bias) of each projection
PROJECTIONS = {
    "one": ((56, 16, False),),
    "one with a bias": ((33, 8, True),),
    "of unequal ranks": ((56, 8, True), (24, 16, False), (24, 20, True)),
    "of rank 1": ((56, 1, False), (24, 1, True)),
    "of large ranks": ((56, 64, False), (24, 70, False)),
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


def linears_inputs(
    device: Any, way: str = "float64", shape: Any = "batch", which: str = "", **how: Any
) -> tuple[Tensor, list[LoraProjection]]:
    """Return x, and some of PROJECTIONS; ``how`` as of ``projection``."""
    dtype, adapters, _ = WAYS[way]
    x = (torch.randn(SHAPES.get(shape, shape)) / 2).to(device, dtype)
    sizes = PROJECTIONS[which or "of unequal ranks"]
    options = {"dtype": dtype, "adapters": adapters, "device": device, **how}
    parts = [projection(o, HIDDEN, rank, bias=bias, **options) for o, rank, bias in sizes]
    return x, parts


def mlp_inputs(
    device: Any,
    way: str = "float64",
    shape: Any = "batch",
    ranks: str = "unequal",
    size: int = SIZE,
    **how: Any,
) -> tuple[Tensor, list[LoraProjection]]:
    """Return x, and the projections gate, up and down; ``how`` as of ``projection``."""
    dtype, adapters, _ = WAYS[way]
    x = (torch.randn(SHAPES.get(shape, shape)) / 2).to(device, dtype)
    hidden_size = x.shape[-1]
    sizes = (size, hidden_size), (size, hidden_size), (hidden_size, size)
    options = {"dtype": dtype, "adapters": adapters, "device": device, **how}
    each = zip(sizes, RANKS[ranks], strict=True)
    return x, [projection(*features, rank, **options) for features, rank in each]


def eager_linear(x: Tensor, part: LoraProjection, mask: Tensor | None = None) -> Tensor:
    """As PEFT's layer has it; the mask: of features that dropout leaves."""
    weight = part.weight
    if not isinstance(weight, Tensor):
        weight = weight.dequantized().to(x.dtype)  # float64's, where x is the truth's
    y = linear(x, weight, part.bias)
    seen = x.to(part.a.dtype)
    if mask is not None:
        seen = seen * mask * (1.0 / (1.0 - part.dropout))
    added = linear(linear(seen, part.a), part.b) * part.scaling
    return (y + added).to(y.dtype)


def eager_linears(x: Tensor, parts: Sequence[LoraProjection]) -> tuple[Tensor, ...]:
    return tuple(eager_linear(x, part) for part in parts)


def eager_mlp(activation: str) -> Layer:
    act = ACTIVATIONS[activation]

    def layer(x: Tensor, parts: Sequence[LoraProjection]) -> tuple[Tensor]:
        gate, up, down = parts
        return (eager_linear(act(eager_linear(x, gate)) * eager_linear(x, up), down),)

    return layer


def our_mlp(activation: str, slice_tokens: int | None = None) -> Layer:
    how: dict[str, Any] = {"activation": activation, "slice_tokens": slice_tokens}
    return lambda x, parts: (gated_mlp(x, *parts, **how),)


def seeded(layer: Layer) -> Layer:
    """The layer, which drops the same features in each call."""

    def call(x: Tensor, parts: Sequence[LoraProjection]) -> tuple[Tensor, ...]:
        torch.manual_seed(7)
        return layer(x, parts)

    return call


def checkpointed(layer: Layer, reentrant: bool) -> Layer:
    return lambda x, parts: checkpoint(layer, x, parts, use_reentrant=reentrant)  # type: ignore[return-value]


def assert_dropped(masks: Sequence[Tensor], rates: Sequence[float]) -> None:
    """Of each mask, about as many are False as its rate says."""
    for mask, rate in zip(masks, rates, strict=True):
        deviation = (rate * (1 - rate) / mask.numel()) ** 0.5
        assert abs(mask.double().mean().item() - (1 - rate)) < 5 * deviation


def tensors_of(x: Tensor, parts: Sequence[LoraProjection]) -> dict[str, Tensor]:
    """By name, "x" first."""
    fields = [(i, part, name) for i, part in enumerate(parts) for name in FIELDS]
    named = {f"{i}.{name}": getattr(part, name) for i, part, name in fields}
    return {"x": x, **{name: v for name, v in named.items() if isinstance(v, Tensor)}}


def of_tensors(layer: Callable[..., Any], parts: Sequence[LoraProjection]) -> Callable[..., Any]:
    """A function of x and projections as one of tensors by name; ``parts`` have the rest."""

    def call(x: Tensor, **tensors: Tensor) -> Any:
        given = list(parts)
        for name, value in tensors.items():
            place, field = name.split(".")
            given[int(place)] = given[int(place)]._replace(**{field: value})
        return layer(x, given)

    return call


def trainable(
    x: Tensor, parts: Sequence[LoraProjection], wanted: str = ADAPTERS
) -> tuple[dict[str, Tensor], list[LoraProjection]]:
    """Return leaves by name, and the projections of them. Names that match ``wanted`` take a
    gradient.
    """
    leaves = {name: value.detach() for name, value in tensors_of(x, parts).items()}
    for name, value in leaves.items():
        value.requires_grad_(re.fullmatch(wanted, name) is not None)
    return leaves, of_tensors(lambda _, given: given, parts)(**leaves)


def results(
    layer: Layer, x: Tensor, parts: Sequence[LoraProjection], *, wanted: str = ADAPTERS, **how: Any
) -> Results:
    """Return results and gradients by name, of names that match ``wanted``; ``how`` as of
    ``results_and_gradients``.
    """
    tensors = tensors_of(x, parts)
    frozen = [name for name in tensors if not re.fullmatch(wanted, name)]
    return layer_checks.results_and_gradients(of_tensors(layer, parts), tensors, frozen, **how)


def check(
    ours: Layer,
    eager: Layer,
    x: Tensor,
    parts: Sequence[LoraProjection],
    *,
    wanted: str = ADAPTERS,
    autocast: bool = False,
    **how: Any,
) -> Results:
    """Hold ours to the rule; return our results. ``how`` as of ``layer_checks.check``."""
    tensors = tensors_of(x, parts)
    dtype = torch.bfloat16 if autocast and x.dtype != torch.float64 else x.dtype
    return layer_checks.check(
        of_tensors(ours, parts),
        of_tensors(eager, parts),
        tensors,
        frozen=[name for name in tensors if not re.fullmatch(wanted, name)],
        autocast=autocast,
        dtype=dtype,
        upstream_dtype=dtype,
        **how,
    )
