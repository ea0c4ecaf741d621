"""The backward pass of a feed-forward layer with LoRA adapters: what is kept, checkpoints,
and what is refused.
"""

import weakref
from typing import Any

import pytest
import torch
from layer_checks import gated_mlp
from lora_checks import (
    ADAPTERS,
    EVERYTHING,
    SIZE,
    Quantized,
    checkpointed,
    mlp_inputs,
    our_mlp,
    results,
    seeded,
    trainable,
)
from slow_cases import each_pair
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_patch.kernels.lora import mlp


def test_what_is_kept(device, kept):
    """x, gate and up of the base, thin products, and A of gate and up as one matrix."""
    leaves, parts = trainable(*mlp_inputs(device, "float16"))
    y = gated_mlp(leaves["x"], *parts)
    given = {each.data_ptr() for each in leaves.values()}
    others = sorted(tuple(t.shape) for t in kept if t.data_ptr() not in given)
    assert others == [(8 + 20, 40), (35, 16), (35, 8 + 20), (35, SIZE), (35, SIZE)]
    y.sum().backward()
    assert all(each.grad is not None for each in leaves.values() if each.requires_grad)


def test_gate_and_up_are_freed_before_the_products_of_dx(device, record):
    """Under checkpoints: else the graph holds them."""

    def of_gate_and_up(da: Tensor, ds: Tensor, gate: Tensor, up: Tensor, *_: Any) -> list[Any]:
        return [weakref.ref(gate), weakref.ref(up)]

    held = record(mlp, "activate_backward", of_gate_and_up)
    alive = record(mlp, "gradients_of_input_", lambda *_: [each() is not None for each in held[0]])
    leaves, parts = trainable(*mlp_inputs(device, "float16"), EVERYTHING)
    y = checkpoint(lambda x: gated_mlp(x, *parts), leaves["x"], use_reentrant=False)
    y.sum().backward()
    assert alive == [[False, False]]


@each_pair(reentrant=[True, False], dropout=[0.0, 0.5], wanted=["x", EVERYTHING])
def test_checkpointing_leaves_out_the_last_product(dropout, reentrant, wanted, device, record):
    """Nothing behind the last saved tensor is computed again, but by reentrant checkpoints."""
    x, parts = mlp_inputs(device, "float16", dropout=dropout, quantized=True)
    products = record(Quantized, "dequantized")

    layer = our_mlp("silu")
    expected = results(seeded(layer), x, parts, wanted=wanted)
    assert len(products) == 3 + 3  # forward, and dx of each
    products.clear()
    ours = results(seeded(checkpointed(layer, reentrant)), x, parts, wanted=wanted)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert len(products) == 3 + (3 if reentrant else 2) + 3


@pytest.mark.gpu
def test_bytes_kept_per_token():
    """x, gate and up, the thin products, and y itself, in bf16."""
    tokens, hidden_size, size = 4096, 1024, 4096
    x, parts = mlp_inputs("cuda", "bfloat16", (tokens, hidden_size), "equal", size)
    leaves, parts = trainable(x, parts)
    del x
    gated_mlp(leaves["x"], *parts).sum().backward()  # whatever is allocated once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = gated_mlp(leaves["x"], *parts)
    kept = torch.cuda.memory_allocated() - before
    thin = 2 * 3 * 16
    # x is there in any case; the allocator rounds each tensor up to 2 MiB at most
    assert kept <= tokens * (4 * size + thin + 2 * hidden_size) + 3 * 2**21
    assert y.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_computed_again_in_the_threads_of_autograd(reentrant):
    x, parts = mlp_inputs("cuda", "autocast", (300, 512), size=1024)
    how = {"autocast": True, "wanted": "x" if reentrant else ADAPTERS}
    both = checkpointed(our_mlp("silu"), reentrant), our_mlp("silu")
    runs = [results(layer, x, parts, **how) for layer in both]
    torch.testing.assert_close(*runs, rtol=0, atol=0)
