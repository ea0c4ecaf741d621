"""Scaling a gradient in place by a factor on the device."""

import math

import pytest
import torch
from slow_cases import each_pair
from three_ways import DTYPES, LOW_DTYPES

from liger_patch.kernels.head.gradients import scale_

SIZES = [(0,), (1,), (8191,), (8193,), (3, 5, 7), (131, 64)]


@each_pair(dtype=DTYPES, size=SIZES, factor=[1.0, -2.0, 0.3, 0.0])
def test_values_are_multiplied_in_place(dtype, size, factor, device):
    number = math.prod(size)
    whole = torch.randn(number + 5, device=device).to(dtype)
    values, beyond = whole[:number].view(size), whole[number:].clone()
    factor = torch.tensor(factor, device=device)
    expected = (values.double() * factor.double()).to(dtype)
    scale_([values], factor)
    torch.testing.assert_close(values, expected)
    assert torch.equal(whole[number:], beyond)


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_factor_of_one_leaves_every_bit(dtype, device):
    values = torch.tensor([0.1, math.nan, math.inf, -math.inf, -0.0, 1e-7], device=device).to(dtype)
    before = values.clone()
    scale_([values], torch.tensor(1.0, device=device))
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert torch.equal(values.view(integers), before.view(integers))


@pytest.mark.parametrize("sizes", [(3, 20_000), (20_000, 3), (5, 0, 7), ()], ids=str)
def test_several_of_any_size_and_dtype(sizes, device):
    dtypes = [torch.bfloat16, torch.float32, torch.float16]
    values = [
        torch.ones(size, device=device, dtype=d) for size, d in zip(sizes, dtypes, strict=False)
    ]
    scale_(values, torch.tensor(3.0, device=device))
    assert all(each.eq(3).all() for each in values)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2**31 + 77])
def test_more_elements_than_32_bits_count(size):
    values = torch.ones(size, dtype=torch.bfloat16, device="cuda")
    scale_([values], torch.tensor(3.0, device="cuda"))
    assert values.eq(3).all()
