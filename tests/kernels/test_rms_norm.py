"""Norms: results and every gradient against float64, no worse than what the models compute in the
same dtype, of rows in any order.
"""

from functools import partial

import pytest
import torch
from eager_layers import EPS, gemma_norm, llama_norm
from layer_checks import check, rms_norm
from slow_cases import slow_but
from three_ways import DTYPES
from torch import Tensor

from liger_patch.kernels.backend import empty_in_order, in_order_of, serves_triton
from liger_patch.kernels.rms_norm import rms_norm_backward

ROWS = {
    "one": (1, 3),
    "aligned": (64, 128),
    "unaligned": (13, 37),
    "heads": (2, 3, 5, 16),
    "two blocks": (5, 1100),
    "long": (3, 5000),
    "none": (0, 8),
}


@pytest.mark.parametrize("shape", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtype", slow_but([DTYPES[0], DTYPES[-1]], DTYPES), ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(shape, dtype, offset, device):
    inputs = {"x": torch.randn(shape) * 3, "weight": torch.randn(shape[-1])}
    inputs = {name: value.to(device, dtype) for name, value in inputs.items()}
    eager = gemma_norm if offset else llama_norm
    check(lambda x, weight: rms_norm(x, weight, EPS, offset=offset), eager, inputs)


def test_rms_norm_of_one_feature(device):
    """Whose gradient is nothing but rounding, in eager too."""
    x, weight = torch.randn(5, 1, device=device), torch.randn(1, device=device)
    expected = llama_norm(x.double(), weight.double())
    torch.testing.assert_close(rms_norm(x, weight, EPS), expected.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_of_a_wider_weight_has_its_dtype(dtype, device):
    x, weight = torch.randn(7, 24, device=device, dtype=dtype), torch.randn(24, device=device)
    ours = partial(rms_norm, eps=EPS, dtype=torch.float32)
    check(ours, llama_norm, {"x": x, "weight": weight})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_rms_norm_without_a_weight(dtype, device):
    x = torch.randn(9, 33, device=device, dtype=dtype)
    ones = torch.ones(33, device=device, dtype=dtype)
    check(lambda x: rms_norm(x, None, EPS), lambda x: llama_norm(x, ones), {"x": x})


VIEWS = {
    "transposed": lambda x: x.transpose(1, 2),
    "expanded": lambda x: x[:, :1].expand(2, 6, 5, 16),
    "alone": lambda x: x[:1].transpose(1, 2).as_strided((1, 5, 6, 16), (7, 16, 80, 1)),
    # where another dimension has a stride of 1 too
    "windows": lambda x: x.flatten().unfold(0, 16, 1)[:9],
    "expanded beside one": lambda x: (
        x.flatten()[:12].view(2, 6, 1, 1).transpose(1, 3).expand(2, 1, 3, 6)
    ),
}


@pytest.mark.parametrize("made", VIEWS)
def test_rms_norm_of_any_strides(made, device):
    x = torch.randn(2, 6, 5, 16, device=device, dtype=torch.bfloat16)
    view = VIEWS[made]
    weight = torch.randn(view(x).shape[-1], device=device, dtype=torch.bfloat16)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        y = rms_norm(view(x), weight, EPS)
        if made == "transposed":  # heads stay in front of tokens without a copy
            assert y.stride() == view(x).stride()
        return y

    check(ours, lambda x, weight: llama_norm(view(x), weight), {"x": x, "weight": weight})


@pytest.mark.parametrize("made", VIEWS)
def test_rows_in_another_order_are_copied_and_no_others(made):
    x = VIEWS[made](torch.randn(2, 6, 5, 16))
    result = empty_in_order(x, torch.float64)
    assert result.shape == x.shape
    assert torch.empty_like(result).stride() == result.stride()  # it is dense
    others = [x, x.clone(memory_format=torch.contiguous_format), x.mT.contiguous().mT]
    for other in others:
        ordered = in_order_of(result, other)
        assert ordered.stride() == result.stride()
        assert torch.equal(ordered, other)
        assert ordered.dtype == other.dtype
    in_order = torch.empty_like(result, dtype=x.dtype)
    assert in_order_of(result, in_order) is in_order
    alone = in_order[:1]
    odd = alone.as_strided(alone.shape, (7, *alone.stride()[1:]))  # nothing is 7 elements apart
    assert in_order_of(alone, odd) is odd


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64], ids=str)
def test_rms_norm_of_a_weight_in_a_dtype_of_its_own(dtype, device):
    x, weight = torch.randn(7, 24, device=device), torch.randn(24, device=device).to(dtype)
    assert not serves_triton(x, weight)  # not every GPU's Triton loads such
    ours = rms_norm(x, weight, EPS, offset=1.0)
    torch.testing.assert_close(ours, gemma_norm(x, weight.float()))


def test_the_gradient_of_a_frozen_weight_is_not_computed(device):
    x, weight = torch.randn(5, 16, device=device), torch.randn(16, device=device)
    _, dweight = rms_norm_backward(torch.ones_like(x), x, weight, EPS, 0.0, False)
    assert not dweight.numel()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_a_row_that_is_none_adds_nothing_to_the_gradient_of_the_weight(device):
    """A tile has more rows than there are; without eps, the deviation of such a row is infinite."""
    inputs = {"x": torch.randn(5, 16, device=device), "weight": torch.randn(16, device=device)}

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True))

    check(lambda x, weight: rms_norm(x, weight, 0.0), plain, inputs)
