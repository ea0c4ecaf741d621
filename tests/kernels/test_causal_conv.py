"""Causal convolutions: results and every gradient against float64, no worse than PyTorch's."""

from functools import partial

import pytest
import torch
from eager_layers import causal_conv as eager
from layer_checks import causal_conv, check
from slow_cases import slow_but
from three_ways import DTYPES
from torch import Tensor

SHAPES = {  # of x; 32 and 128 tokens are a program's in the Triton form, 256 its channels
    "one token": (1, 1, 16),
    "less than the width": (2, 3, 24),
    "several programs": (1, 131, 40),
    "many channels": (1, 5, 300),
}


def inputs(
    shape: tuple[int, ...], width: int, has_bias: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    made = {"x": torch.randn(shape), "weight": torch.randn(shape[-1], width)}
    if has_bias:
        made["bias"] = torch.randn(shape[-1])
    return {name: value.to(device, dtype) for name, value in made.items()}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", slow_but([DTYPES[0], DTYPES[-1]], DTYPES), ids=str)
@pytest.mark.parametrize("width", slow_but([4, 5], [1, 3, 4, 5]))
@pytest.mark.parametrize(("has_bias", "activation"), [(False, "silu"), (True, None)])
def test_causal_conv(shape, dtype, width, has_bias, activation, device):
    check(
        partial(causal_conv, activation=activation),
        partial(eager, activation=activation),
        inputs(shape, width, has_bias, device, dtype),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("width", slow_but([4], [2, 4]))
def test_sequences_of_a_row_are_those_of_rows_of_their_own(dtype, width, device):
    lengths = [1, 2, 61, 1, 3, 64, 5]  # with boundaries at those of a program's rows
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(device)[None]

    def separate(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        parts = [eager(part, weight, bias, "silu") for part in x.split(lengths, 1)]
        return torch.cat(parts, 1)

    check(
        partial(causal_conv, activation="silu", sequence_ids=ids),
        separate,
        inputs((1, sum(lengths), 24), width, True, device, dtype),
    )


def test_a_gate_beside_it_in_memory_is_not_copied_to_be_kept(quick_device, kept):
    both = torch.randn(2, 9, 48, device=quick_device, requires_grad=True)
    weight = torch.randn(24, 4, device=quick_device, requires_grad=True)
    causal_conv(both[..., 8:32], weight)
    memory = {t.untyped_storage().data_ptr() for t in kept}
    assert memory == {t.untyped_storage().data_ptr() for t in (both, weight)}
