"""Dtypes of the products: as torch.nn.functional.linear under the same autocast state."""

import itertools

import pytest
import torch
from slow_cases import pairwise
from three_ways import check_linear, linear_inputs

from liger_patch.kernels import reference
from liger_patch.kernels.cross_entropy import cross_entropy
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy

CPU = torch.device("cpu")
MIXTURES = list(itertools.product([torch.bfloat16, torch.float32], repeat=3))


@pytest.mark.parametrize(
    ("mixture", "dtype", "reduction", "ignored"),
    pairwise(MIXTURES, [torch.bfloat16, torch.float16], ["none", "mean"], [0.0, 0.3]),
)
def test_autocast_is_that_of_linear(mixture, dtype, reduction, ignored):
    inputs, labels = linear_inputs(torch.float32, CPU, bias=True, ignored=ignored)
    inputs = {n: v.to(d) for (n, v), d in zip(inputs.items(), mixture, strict=True)}
    ours = check_linear(inputs, labels, reduction=reduction, autocast=dtype)
    assert ours["loss"].dtype == torch.float32


def test_autocast_leaves_float64_alone():
    inputs, labels = linear_inputs(torch.float64, CPU)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(**inputs, labels=labels)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, reference.linear_cross_entropy(**inputs, labels=labels))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_ready_made_logits_alone(dtype):
    """Sums of 32,000 of them are infinite in float16."""
    logits, labels = 6 * torch.randn(4, 32000), torch.randint(32000, (4,))
    expected = cross_entropy(logits, labels, label_smoothing=0.1)
    with torch.autocast("cpu", dtype):
        loss = cross_entropy(logits, labels, label_smoothing=0.1)
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("mixture", [m for m in MIXTURES if len(set(m)) > 1], ids=str)
def test_mixed_dtypes_without_autocast_are_an_error(mixture):
    inputs, labels = linear_inputs(torch.float32, CPU, bias=True)
    inputs = {n: v.to(d) for (n, v), d in zip(inputs.items(), mixture, strict=True)}
    with pytest.raises(ValueError, match="must share a dtype outside autocast"):
        linear_cross_entropy(**inputs, labels=labels)
