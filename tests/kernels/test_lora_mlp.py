"""A gated feed-forward layer with LoRA adapters as two functions: results and every gradient
against float64, no worse than PEFT's arithmetic.
"""

import pytest
from layer_checks import ACTIVATIONS
from lora_checks import (
    ADAPTERS,
    EVERYTHING,
    HIDDEN,
    RANKS,
    WAYS,
    check,
    eager_mlp,
    mlp_inputs,
    our_mlp,
)
from slow_cases import each_pair

FORMS = [  # activation, tokens of a slice, whether there are biases
    *((activation, None, False) for activation in ACTIVATIONS),
    *(("silu", tokens, True) for tokens in (1, 4, 100)),
]


@each_pair(base=[(False, ADAPTERS), (False, EVERYTHING), (True, EVERYTHING)], form=FORMS, way=WAYS)
def test_lora_mlp(way, form, base, device):
    (quantized, wanted), (activation, slice_tokens, bias) = base, form
    x, parts = mlp_inputs(device, way, bias=bias, quantized=quantized)
    how = {"wanted": wanted, "autocast": WAYS[way][2]}
    check(our_mlp(activation, slice_tokens), eager_mlp(activation), x, parts, **how)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("way", ["float32", "float16"])
def test_any_rank(way, ranks, device):
    shape = 20, 30, HIDDEN  # of fewer numbers, the largest error of a gradient of rank 1 is luck
    x, parts = mlp_inputs(device, way, shape, ranks=ranks)
    check(our_mlp("silu"), eager_mlp("silu"), x, parts, wanted=EVERYTHING)


@pytest.mark.parametrize("scaling", [1.0, -0.25, 0.0, 16.0])
@pytest.mark.parametrize("way", ["float64", "float16"])
def test_scaling(way, scaling, device):
    """Each projection has its own."""
    x, parts = mlp_inputs(device, way)
    parts = [part._replace(scaling=scaling / (i + 1)) for i, part in enumerate(parts)]
    check(our_mlp("silu"), eager_mlp("silu"), x, parts, wanted=EVERYTHING)


@pytest.mark.parametrize("way", ["float64", "float32", "float16"])
def test_to_another_size(way, device):
    x, (gate, up, down) = mlp_inputs(
        device, way, (16, 6, HIDDEN)
    )  # of few numbers, errors are luck
    parts = [gate, up, down._replace(weight=down.weight[:9], b=down.b[:9])]
    check(our_mlp("silu"), eager_mlp("silu"), x, parts, wanted=EVERYTHING)
