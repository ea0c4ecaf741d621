"""Feed-forward layers over slices of their tokens: results and every gradient against float64, no
worse than eager's, what is kept and made, and how many products checkpointing computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from eager_layers import mlp
from kernel_forms import INTERPRETED
from layer_calls import gated_mlp
from layer_checks import ACTIVATIONS
from layer_checks import check as check_plain
from lora_checks import (
    ADAPTERS,
    EVERYTHING,
    WAYS,
    Quantized,
    check,
    eager_mlp,
    projection,
    results,
    trainable,
)
from slow_cases import pairwise, slow_but
from three_ways import LOW_DTYPES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from liger_patch.kernels.chunk_sizes import LONG_BYTES, SLICE_BYTES, slice_tokens
from liger_patch.kernels.lora.projection import LoraProjection

HIDDEN, SIZE = 24, 40
SHAPES = {"rows": (7, HIDDEN), "batch": (2, 5, HIDDEN), "none": (0, HIDDEN)}
SLICES = {"of one": 1, "uneven": 4, "one": 100}


def sliced(tokens: int | None, activation: str = "silu") -> Callable[..., Tensor]:
    def layer(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return gated_mlp(x, gate, up, down, activation=activation, slice_tokens=tokens)

    return layer


def made(shape: tuple[int, ...], device: Any, dtype: torch.dtype) -> Any:
    sizes = {"x": shape, "gate": (SIZE, HIDDEN), "up": (SIZE, HIDDEN), "down": (HIDDEN, SIZE)}
    return {n: (torch.randn(size) / 2).to(device, dtype) for n, size in sizes.items()}


def sliced_lora(tokens: int | None, activation: str = "silu") -> Any:
    def layer(x: Tensor, parts: Any) -> tuple[Tensor]:
        return (gated_mlp(x, *parts, activation=activation, slice_tokens=tokens),)

    return layer


def made_lora(
    device: Any, way: str = "float64", shape: Any = "batch", **how: Any
) -> tuple[Tensor, list[LoraProjection]]:
    dtype, adapters, _ = WAYS[way]
    x = (torch.randn(SHAPES.get(shape, shape)) / 2).to(device, dtype)
    sizes = (SIZE, HIDDEN), (SIZE, HIDDEN), (HIDDEN, SIZE)
    options = {"dtype": dtype, "adapters": adapters, "device": device, **how}
    each = zip(sizes, (4, 8, 6), strict=True)
    return x, [projection(*features, rank, **options) for features, rank in each]


@pytest.mark.parametrize(
    ("activation", "tokens", "shape", "dtype"),
    pairwise(ACTIVATIONS, SLICES.values(), SHAPES.values(), [*LOW_DTYPES, torch.float64]),
)
def test_gated_mlp(dtype: Any, shape: Any, tokens: int, activation: str, device: Any) -> None:
    inputs = made(shape, device, dtype)
    check_plain(sliced(tokens, activation), partial(mlp, activation=activation), inputs)


@pytest.mark.parametrize(
    ("wanted", "tokens", "way"),
    pairwise([ADAPTERS, EVERYTHING], SLICES.values(), WAYS),
)
def test_lora_mlp(way: str, tokens: int, wanted: str, device: torch.device) -> None:
    x, parts = made_lora(device, way, bias=True)
    how = {"wanted": wanted, "autocast": WAYS[way][2]}
    check(sliced_lora(tokens), eager_mlp("silu"), x, parts, **how)


@pytest.mark.parametrize("way", slow_but(["bfloat16"], ["bfloat16", "float16", "autocast"]))
def test_sums_over_many_slices_are_no_worse(way: str, device: torch.device) -> None:
    """Each of 150 slices adds to the same gradients."""
    x, parts = made_lora(device, way, (150, HIDDEN))
    how = {"wanted": EVERYTHING, "autocast": WAYS[way][2]}
    check(sliced_lora(1), eager_mlp("silu"), x, parts, **how)


@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
def test_quantized_bases_are_dequantized_once_in_a_pass(
    way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, parts = made_lora(device, way, quantized=True)
    how = {"wanted": EVERYTHING, "autocast": WAYS[way][2]}
    check(sliced_lora(3), eager_mlp("silu"), x, parts, **how)
    kind: Any = type(parts[0].weight)
    read, count = kind.dequantized, []
    monkeypatch.setattr(kind, "dequantized", lambda each: count.append(each) or read(each))
    results(sliced_lora(3), x, parts, **how)
    assert len(count) == 3 + 3


@pytest.mark.parametrize(
    ("dtype", "which", "tokens"),
    pairwise([*LOW_DTYPES, torch.float64], ["gate", "up", "down", "all"], [4, None]),
)
def test_gated_mlp_of_quantized_weights(
    tokens: int | None, which: str, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = made(SHAPES["batch"], device, dtype)
    names = ("gate", "up", "down") if which == "all" else (which,)
    held = {name: Quantized(inputs.pop(name)) for name in names}

    def ours(x: Tensor, **weights: Any) -> Tensor:
        given = held | weights
        return sliced(tokens)(x, given["gate"], given["up"], given["down"])

    def plain(x: Tensor, **weights: Any) -> Tensor:
        dense = {name: each.dequantized().to(x.dtype) for name, each in held.items()}
        return mlp(x, **dense | weights)

    check_plain(ours, plain, inputs)


def test_x_alone_is_kept(device: torch.device) -> None:
    leaves, parts = trainable(*made_lora(device, "float16"))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = gated_mlp(leaves["x"], *parts, slice_tokens=3)
        z = gated_mlp(leaves["x"], *(each.weight for each in parts), slice_tokens=3)
    assert {each.data_ptr() for each in saved} == {each.data_ptr() for each in leaves.values()}
    (y.sum() + z.sum()).backward()
    assert all(each.grad is not None for each in leaves.values() if each.requires_grad)


class Largest(TorchDispatchMode):
    """Notes the most numbers that one tensor held."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return result


@pytest.mark.parametrize("layer", ["plain", "lora"])
@pytest.mark.parametrize("wanted", [ADAPTERS, EVERYTHING], ids=["frozen base", "trainable base"])
def test_nothing_of_the_size_of_gate_is_made(layer: str, wanted: str, cpu_form: Any) -> None:
    tokens = 500
    leaves, parts = trainable(*made_lora(cpu_form, "float32", (tokens, HIDDEN)), wanted)
    found = []
    for each in (None, 60):
        with Largest() as largest:
            if layer == "lora":
                y = gated_mlp(leaves["x"], *parts, slice_tokens=each)
            else:
                y = gated_mlp(leaves["x"], *(p.weight for p in parts), slice_tokens=each)
            y.backward(torch.ones_like(y))
        found.append(largest.numbers)
    assert found == [tokens * SIZE, tokens * HIDDEN]


@pytest.mark.parametrize(
    ("wanted", "layer", "reentrant"),
    pairwise([ADAPTERS, EVERYTHING], ["plain", "lora"], [True, False]),
)
def test_checkpointing_computes_as_many_products(
    layer: str, wanted: str, reentrant: bool, cpu_form: torch.device
) -> None:
    """As with the layer at once; reentrant, which computes y again, gate and up once more."""
    leaves, parts = trainable(*made_lora(cpu_form, "float32", (12, HIDDEN)), wanted)

    def run(x: Tensor, tokens: int | None) -> Tensor:
        if layer == "lora":
            return gated_mlp(x, *parts, slice_tokens=tokens)
        if tokens is None:  # as its modules compute it
            return mlp(x, *(each.weight for each in parts))
        return gated_mlp(x, *(each.weight for each in parts), slice_tokens=tokens)

    counts = []
    for tokens in (None, 5):
        with FlopCounterMode(display=False) as counted:
            checkpoint(run, leaves["x"], tokens, use_reentrant=reentrant).sum().backward()
        counts.append(counted.get_total_flops())
    at_once, in_slices = counts
    thin = 4 + 8  # ranks of gate and up: s, and what they add to both
    more = 2 * 12 * HIDDEN * 2 * SIZE
    if layer == "lora":
        more += 2 * 12 * (HIDDEN * thin + SIZE * thin + 6 * SIZE)
    if reentrant:
        assert in_slices == pytest.approx(at_once + more, rel=0.03)
    else:
        # the thin products of adapters are counted as the forms have them
        assert in_slices <= at_once * (1.03 if layer == "lora" else 1)


@pytest.mark.parametrize(
    ("reentrant", "dropout", "way"),
    pairwise([True, False], [0.0, 0.5], ["float64", "float16", "autocast"]),
)
def test_checkpoints_give_the_same_bits(
    way: str, dropout: float, reentrant: bool, device: torch.device
) -> None:
    """What is dropped too."""
    x, parts = made_lora(device, way, bias=True, dropout=dropout)

    def of(checkpoints: bool) -> Any:
        def layer(x: Tensor, parts: Any) -> tuple[Tensor]:
            torch.manual_seed(7)
            if checkpoints:
                return (checkpoint(sliced_lora(4), x, parts, use_reentrant=reentrant)[0],)
            return sliced_lora(4)(x, parts)

        return layer

    how = {"autocast": WAYS[way][2], "wanted": "x" if reentrant else ADAPTERS}
    runs = [results(of(checkpoints), x, parts, **how) for checkpoints in (True, False)]
    torch.testing.assert_close(*runs, rtol=0, atol=0)


@pytest.mark.interpreter
def test_slices_drop_other_features() -> None:
    """Of rows that are equal, and every feature now and then."""
    one = torch.eye(HIDDEN, dtype=torch.float16)
    base = torch.zeros_like(one)
    ones = torch.ones(HIDDEN, dtype=torch.float16)
    copied = LoraProjection(base, None, one, one, 1.0, 0.5)
    constant = LoraProjection(base, ones, one, base, 1.0)
    through = LoraProjection(one, None, one, base, 1.0)
    x = torch.ones(200, HIDDEN, dtype=torch.float16)
    masks = (gated_mlp(x, constant, copied, through, slice_tokens=50) != 0).view(4, 50, HIDDEN)
    for i in range(4):
        for j in range(i):
            agree = (masks[i] == masks[j]).double().mean().item()
            assert abs(agree - 0.5) < 5 * (0.25 / masks[i].numel()) ** 0.5
    assert not torch.equal(masks[0].sort(0).values, masks[1].sort(0).values)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter serves float16")
def test_masks_that_are_tensors_run_at_once() -> None:
    x, parts = made_lora("cpu", "float64", dropout=0.5)
    runs = []
    for tokens in (3, None):
        torch.manual_seed(5)
        runs.append(results(sliced_lora(tokens), x, parts))
    torch.testing.assert_close(*runs, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1024, 14336, 28672])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_slices_are_within_their_budget(size: int, itemsize: int) -> None:
    """Whatever is short runs at once; slices of a long row are nearly equal."""
    most = LONG_BYTES // (5 * size * itemsize)
    assert slice_tokens(most, size, itemsize) is None
    for tokens in (most + 1, 3 * most, 100 * most + 17):
        rows = slice_tokens(tokens, size, itemsize)
        assert rows is not None
        assert rows % 128 == 0
        assert SLICE_BYTES / 2 < rows * 5 * size * itemsize <= SLICE_BYTES
