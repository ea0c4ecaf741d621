"""Linear layers with LoRA adapters as one function: results and every gradient against float64, no
worse than PEFT's arithmetic.
"""

from typing import Any

import pytest
import torch
from layer_checks import lora_linears
from lora_checks import (
    ADAPTERS,
    EVERYTHING,
    PROJECTIONS,
    SHAPES,
    WAYS,
    check,
    eager_linears,
    linears_inputs,
    mlp_inputs,
    our_mlp,
    projection,
    results,
    trainable,
)
from slow_cases import each_pair


@each_pair(
    base=[(False, ADAPTERS), (False, EVERYTHING), (True, EVERYTHING)], which=PROJECTIONS, way=WAYS
)
def test_lora_linears(way, which, base, device):
    quantized, wanted = base
    x, parts = linears_inputs(device, way, which=which, quantized=quantized)
    check(lora_linears, eager_linears, x, parts, wanted=wanted, autocast=WAYS[way][2])


@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_batch_dimensions(shape, device):
    x, parts = linears_inputs(device, shape=shape)
    check(lora_linears, eager_linears, x, parts, wanted=EVERYTHING)


@pytest.mark.parametrize("unused", [(0,), (1,), (0, 2)], ids=str)
@pytest.mark.parametrize("way", ["float64", "autocast"])
def test_an_output_that_is_not_used(unused, way, device):
    """Of which autograd gives no upstream gradient. Its own parameters may get zeros instead."""
    x, parts = linears_inputs(device, way)
    used = "".join(str(i) for i in range(3) if i not in unused)
    wanted = rf"x|[{used}]\..*"
    how = {"wanted": wanted, "unused": unused, "autocast": WAYS[way][2]}
    check(lora_linears, eager_linears, x, parts, **how)
    ours = results(lora_linears, x, parts, **{**how, "wanted": EVERYTHING})
    for i in unused:
        rest = [ours[f"{i}.{name}"] for name in ("weight", "a", "b")]
        assert not any(each is not None and each.any() for each in rest)


def test_a_quantized_base_is_not_kept_dense(device, kept):
    x, parts = linears_inputs(device, "float32", quantized=True)
    leaves, parts = trainable(x, parts)
    ys = lora_linears(leaves["x"], parts)
    given = {each.data_ptr() for each in leaves.values()}
    ranks = 8 + 16 + 20
    others = [tuple(t.shape) for t in kept if t.data_ptr() not in given]
    assert others == [(35, ranks), (ranks, 40)]  # s, and A of all projections
    sum(y.sum() for y in ys).backward()
    assert all(leaves[f"{i}.a"].grad is not None for i in range(3))


def test_adapters_are_cast_in_one_call(device, record):
    calls = record(torch, "_foreach_copy_", lambda targets, _: len(targets))
    leaves, parts = trainable(*linears_inputs(device, "autocast"))
    with torch.autocast(device.type, torch.bfloat16):
        ys = lora_linears(leaves["x"], parts)
    sum(y.sum() for y in ys).backward()
    assert calls == [6]  # A and B of three, and none in the backward pass


@pytest.mark.parametrize("adapters", [torch.float16, torch.float32], ids=str)
def test_the_scaling_keeps_gradients_finite(adapters, device):
    """PEFT scales dy, not dB: in float16, a sum that is scaled last overflows."""
    options: Any = {"dtype": torch.float16, "adapters": adapters, "device": device}
    part = projection(24, 40, 8, **options)._replace(scaling=0.125)
    leaves, (part,) = trainable(torch.ones(4096, 40, dtype=torch.float16, device=device), [part])
    with torch.no_grad():
        part.a.fill_(0.25)
    with torch.autocast(device.type, torch.float16):
        (y,) = lora_linears(leaves["x"], [part])
    (db,) = torch.autograd.grad(y, part.b, torch.full_like(y, 10.0))
    torch.testing.assert_close(db, torch.full_like(db, 4096 * 10 * 10 * 0.125), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [(lora_linears, linears_inputs), (our_mlp("silu"), mlp_inputs)],
    ids=["linears", "mlp"],
)
def test_a_cast_adapter_may_change_before_the_backward_pass(layer, inputs, device):
    """As under autocast, gradients are those of the values that the forward pass had."""
    leaves, parts = trainable(*inputs(device, "autocast"))
    with torch.autocast(device.type, torch.bfloat16):
        total = sum(y.sum() for y in layer(leaves["x"], parts))
    asked = [each for each in leaves.values() if each.requires_grad]
    expected = torch.autograd.grad(total, asked, retain_graph=True)
    with torch.no_grad():
        for i in range(len(parts)):
            leaves[f"{i}.a"].mul_(2)
            leaves[f"{i}.b"].mul_(2)
    found = torch.autograd.grad(total, asked)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
