"""A gated feed-forward layer in one function: results and every gradient against float64, no worse
than three linear layers, and what it keeps for the backward pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from eager_layers import mlp
from exactness import assert_no_worse
from layer_calls import gated_mlp
from layer_checks import ACTIVATIONS, check
from slow_cases import pairwise
from three_ways import LOW_DTYPES
from torch import Tensor

HIDDEN, SIZE = 24, 40
SHAPES = {"rows": (7, HIDDEN), "batch": (2, 3, HIDDEN), "none": (0, HIDDEN)}


def made(shape: tuple[int, ...], device: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    sizes = {
        "x": shape,
        "gate": (SIZE, HIDDEN),
        "up": (SIZE, HIDDEN),
        "down": (HIDDEN, SIZE),
    }
    return {n: (torch.randn(size) / 2).to(device, dtype) for n, size in sizes.items()}


def trainable(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().requires_grad_() for name, value in inputs.items()}


@pytest.mark.parametrize(
    ("activation", "shape", "dtype"),
    pairwise(ACTIVATIONS, SHAPES.values(), [*LOW_DTYPES, torch.float64]),
)
def test_gated_mlp(activation, shape, dtype, device):
    inputs = made(shape, device, dtype)
    check(*(partial(each, activation=activation) for each in (gated_mlp, mlp)), inputs)


def test_gated_mlp_of_one_row(device):
    """In float64: of so few numbers in 16 bits, eager's are now and then exact."""
    check(gated_mlp, mlp, made((HIDDEN,), device, torch.float64))


def test_gated_mlp_without_intermediate_features(device):
    inputs = made(SHAPES["batch"], device, torch.float64)
    for name in ("gate", "up"):
        inputs[name] = inputs[name][:0]
    inputs["down"] = inputs["down"][:, :0]
    check(gated_mlp, mlp, inputs)


def test_gated_mlp_to_another_size(device):
    inputs = made(SHAPES["batch"], device, torch.float64)
    inputs["down"] = inputs["down"][:5]
    check(gated_mlp, mlp, inputs)


@pytest.mark.parametrize("dtype", [*LOW_DTYPES, torch.float64], ids=str)
def test_gated_mlp_of_one_product(dtype, device):
    inputs = made(SHAPES["batch"], device, dtype)
    both = torch.cat((inputs.pop("gate"), inputs.pop("up")))

    def ours(x: Tensor, down: Tensor, both: Tensor) -> Tensor:
        return gated_mlp(x, both, None, down)

    def plain(x: Tensor, down: Tensor, both: Tensor) -> Tensor:
        return mlp(x, *both.chunk(2), down)

    check(ours, plain, inputs | {"both": both})


def test_the_activation_is_not_kept(device):
    inputs = trainable(made(SHAPES["rows"], device, torch.float32))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = gated_mlp(**inputs)
    given = {each.data_ptr() for each in inputs.values()}  # x and the weights
    others = [each.shape for each in saved if each.data_ptr() not in given]
    assert others == [(7, SIZE), (7, SIZE)]  # gate and up
    y.sum().backward()
    assert all(each.grad is not None for each in inputs.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("where", ["forward", "both"])
def test_under_autocast_products_run_in_its_dtype(where, dtype, device):
    """But those of float64, which autocast leaves alone."""
    inputs = trainable(made(SHAPES["batch"], device, dtype))
    autocast = torch.autocast(torch.device(device).type, dtype=torch.bfloat16)
    results = []
    for layer in (gated_mlp, mlp):
        with autocast:
            y = layer(**inputs)
            if where == "both":
                gradients = torch.autograd.grad(y.sum(), list(inputs.values()))
        if where == "forward":
            gradients = torch.autograd.grad(y.sum(), list(inputs.values()))
        results.append(dict(zip(("y", *inputs), (y.detach(), *gradients), strict=True)))
    ours, plain = results
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in plain.items()}
    wide = trainable({name: value.double() for name, value in inputs.items()})
    y = mlp(**wide)
    gradients = torch.autograd.grad(y.sum(), list(wide.values()))
    truth = dict(zip(("y", *inputs), (y.detach(), *gradients), strict=True))
    if dtype == torch.float64:
        torch.testing.assert_close(ours, truth)
    else:
        assert_no_worse(ours, plain, truth, torch.bfloat16)
