"""Linear and cross entropy in one, in every option, dtype, shape and reduction, with adapters; and
under autocast, where products run in the dtype of torch.nn.functional.linear.
"""

import itertools

import pytest
import torch
from slow_cases import each_pair
from three_ways import DTYPES, OPTIONS, check_linear, chunk_mib, filled, linear_inputs

from liger_patch.kernels import reference
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy

CPU = torch.device("cpu")
MIXTURES = list(itertools.product([torch.bfloat16, torch.float32], repeat=3))
SHAPES = {  # N, H, V
    "aligned": (64, 64, 256),
    "unaligned": (13, 37, 131),
    "one_of_each": (1, 1, 2),
    # H above 256: a bias was once added per block of 256 (cut_cross_entropy #52)
    "wide": (6, 300, 32),
    "many_blocks": (5, 40, 9001),
    "no_power": (9, 5, 1021),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [0, 4], ids=["", "adapter"])
def test_every_option_in_every_dtype(options, dtype, rank, device):
    inputs, labels = linear_inputs(dtype, device, bias=dtype != torch.float16, rank=rank)
    options = filled(options, len(labels), 131, device)
    check_linear(inputs, labels, chunk_mib=chunk_mib(5, 131, dtype), **options)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_shape(shape, dtype, cpu_form):
    tokens, _, vocab_size = shape
    inputs, labels = linear_inputs(dtype, cpu_form, *shape, bias=True)
    check_linear(inputs, labels, **filled(OPTIONS["everything"], tokens, vocab_size, cpu_form))


def test_adapter_in_float32_beside_a_bf16_head(device):
    """As PEFT keeps it: each gradient comes in its input's own dtype."""
    inputs, labels = linear_inputs(torch.bfloat16, device, 64, rank=8)
    inputs |= {name: inputs[name].float() for name in ("low_rank", "low_rank_weight")}
    check_linear(inputs, labels, frozen=["weight"])


@each_pair(
    mixture=MIXTURES,
    dtype=[torch.bfloat16, torch.float16],
    reduction=["none", "mean"],
    ignored=[0.0, 0.3],
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


@pytest.mark.parametrize("mixture", [m for m in MIXTURES if len(set(m)) > 1], ids=str)
def test_mixed_dtypes_without_autocast_are_an_error(mixture):
    inputs, labels = linear_inputs(torch.float32, CPU, bias=True)
    inputs = {n: v.to(d) for (n, v), d in zip(inputs.items(), mixture, strict=True)}
    with pytest.raises(ValueError, match="must share a dtype outside autocast"):
        linear_cross_entropy(**inputs, labels=labels)
