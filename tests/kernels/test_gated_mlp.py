"""A gated feed-forward layer in one function: results and every gradient against float64, no worse
than three linear layers, and what it keeps for the backward pass.
"""

from functools import partial
from itertools import cycle, product

import pytest
import torch
from eager_layers import MLP_SIZE, mlp, mlp_tensors
from layer_checks import ACTIVATIONS, check, gated_mlp
from lora_checks import Quantized
from slow_cases import each_pair
from three_ways import DTYPES
from torch import Tensor

from liger_patch.kernels.gated_mlp import run_gated_mlp
from liger_patch.kernels.lora.projection import without_adapter

HIDDEN = 24
SHAPES = {"rows": (7, HIDDEN), "batch": (2, 5, HIDDEN), "none": (0, HIDDEN)}
WEIGHTS = ("gate", "up", "down")
FORMS = [  # weights that are quantized, tokens of a slice, and the activation
    *product([()], [None, 1, 4, 100], ACTIVATIONS),
    *(
        (*form, activation)
        for form, activation in zip(
            product([("gate",), ("up",), ("down",), WEIGHTS], [None, 4]), cycle(ACTIVATIONS)
        )
    ),
]


def trainable(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().requires_grad_() for name, value in inputs.items()}


@each_pair(form=FORMS, shape=SHAPES.values(), dtype=DTYPES)
def test_gated_mlp(form, shape, dtype, device):
    quantized, slice_tokens, activation = form
    inputs = mlp_tensors(shape, device, dtype)
    held = {name: Quantized(inputs.pop(name)) for name in quantized}
    ours = partial(gated_mlp, **held, activation=activation, slice_tokens=slice_tokens)

    def plain(x: Tensor, **weights: Tensor) -> Tensor:
        dense = {name: each.dequantized().to(x.dtype) for name, each in held.items()}
        return mlp(x, **weights, **dense, activation=activation)

    check(ours, plain, inputs)


@pytest.mark.parametrize(
    ("shape", "inside", "out"),
    [((HIDDEN,), MLP_SIZE, HIDDEN), ((2, 5, HIDDEN), 0, HIDDEN), ((2, 5, HIDDEN), MLP_SIZE, 5)],
    ids=["one row", "no intermediate features", "another size of y"],
)
def test_gated_mlp_of_other_sizes(shape, inside, out, device):
    """In float64: of so few numbers in 16 bits, eager's are now and then exact."""
    inputs = mlp_tensors(shape, device, torch.float64)
    inputs |= {name: inputs[name][:inside] for name in ("gate", "up")}
    inputs["down"] = inputs["down"][:out, :inside]
    check(gated_mlp, mlp, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_mlp_of_one_product(dtype, device):
    inputs = mlp_tensors(SHAPES["batch"], device, dtype)
    both = torch.cat((inputs.pop("gate"), inputs.pop("up")))
    check(
        lambda x, down, both: gated_mlp(x, both, None, down),
        lambda x, down, both: mlp(x, *both.chunk(2), down),
        inputs | {"both": both},
    )


def test_a_result_with_a_bias_can_be_written_to(device):
    inputs = trainable(mlp_tensors(SHAPES["batch"], device, torch.float64))
    parts = [without_adapter(inputs[name]) for name in WEIGHTS]
    parts = [part._replace(bias=part.weight[:, 0]) for part in parts]
    run_gated_mlp(inputs["x"], *parts, torch.float64, "silu", None).add_(1.0).sum().backward()
    assert all(each.grad is not None for each in inputs.values())


def test_the_activation_is_not_kept(device, kept):
    inputs = trainable(mlp_tensors(SHAPES["rows"], device, torch.float32))
    y = gated_mlp(**inputs)
    given = {each.data_ptr() for each in inputs.values()}  # x and the weights
    others = [each.shape for each in kept if each.data_ptr() not in given]
    assert others == [(7, MLP_SIZE), (7, MLP_SIZE)]  # gate and up
    y.sum().backward()
    assert all(each.grad is not None for each in inputs.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_under_autocast_products_run_in_its_dtype(dtype, device):
    """But those of float64, which autocast leaves alone."""
    inputs = mlp_tensors(SHAPES["batch"], device, dtype)
    of_products = dtype if dtype == torch.float64 else torch.bfloat16
    check(gated_mlp, mlp, inputs, autocast=True, dtype=of_products)
