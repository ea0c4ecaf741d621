"""Feed-forward layers over slices of their tokens: results and every gradient against float64, no
worse than eager's, what is kept and made, and how many products checkpointing computes.
"""

import pytest
import torch
from eager_layers import mlp
from kernel_forms import INTERPRETED
from layer_checks import gated_mlp
from lora_checks import (
    ADAPTERS,
    EVERYTHING,
    HIDDEN,
    SIZE,
    WAYS,
    Quantized,
    check,
    eager_mlp,
    mlp_inputs,
    our_mlp,
    results,
    seeded,
    trainable,
)
from slow_cases import each_pair, slow_but
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from trainers import LargestTensor

from liger_patch.kernels.chunk_sizes import LONG_BYTES, SLICE_BYTES, slice_tokens
from liger_patch.kernels.lora.projection import LoraProjection


@pytest.mark.parametrize("way", slow_but(["bfloat16"], ["bfloat16", "float16", "autocast"]))
def test_sums_over_many_slices_are_no_worse(way, device):
    """Each of 150 slices adds to the same gradients."""
    x, parts = mlp_inputs(device, way, (150, HIDDEN))
    how = {"wanted": EVERYTHING, "autocast": WAYS[way][2]}
    check(our_mlp("silu", 1), eager_mlp("silu"), x, parts, **how)


@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
def test_quantized_bases_are_dequantized_once_in_a_pass(way, device, record):
    x, parts = mlp_inputs(device, way, quantized=True)
    how = {"wanted": EVERYTHING, "autocast": WAYS[way][2]}
    check(our_mlp("silu", 3), eager_mlp("silu"), x, parts, **how)
    count = record(Quantized, "dequantized")
    results(our_mlp("silu", 3), x, parts, **how)
    assert len(count) == 3 + 3


def test_x_alone_is_kept(device, kept):
    leaves, parts = trainable(*mlp_inputs(device, "float16"))
    y = gated_mlp(leaves["x"], *parts, slice_tokens=3)
    z = gated_mlp(leaves["x"], *(each.weight for each in parts), slice_tokens=3)
    assert {each.data_ptr() for each in kept} == {each.data_ptr() for each in leaves.values()}
    (y.sum() + z.sum()).backward()
    assert all(each.grad is not None for each in leaves.values() if each.requires_grad)


@pytest.mark.parametrize("layer", ["plain", "lora"])
@pytest.mark.parametrize("wanted", [ADAPTERS, EVERYTHING], ids=["frozen base", "trainable base"])
def test_nothing_of_the_size_of_gate_is_made(layer, wanted, cpu_form):
    tokens = 500
    leaves, parts = trainable(*mlp_inputs(cpu_form, "float32", (tokens, HIDDEN)), wanted)
    parts = parts if layer == "lora" else [each.weight for each in parts]
    found = []
    for each in (None, 60):
        with LargestTensor() as largest:
            y = gated_mlp(leaves["x"], *parts, slice_tokens=each)
            y.backward(torch.ones_like(y))
        found.append(largest.elements)
    assert found == [tokens * SIZE, tokens * HIDDEN]


@each_pair(wanted=[ADAPTERS, EVERYTHING], layer=["plain", "lora"], reentrant=[True, False])
def test_checkpointing_computes_as_many_products(layer, wanted, reentrant, cpu_form):
    """As with the layer at once; reentrant, which computes y again, gate and up once more."""
    leaves, parts = trainable(*mlp_inputs(cpu_form, "float32", (12, HIDDEN)), wanted)
    parts = parts if layer == "lora" else [each.weight for each in parts]

    def run(x: Tensor, tokens: int | None) -> Tensor:
        if layer == "plain" and tokens is None:  # as its modules compute it
            return mlp(x, *parts)
        return gated_mlp(x, *parts, slice_tokens=tokens)

    counts = []
    for tokens in (None, 5):
        with FlopCounterMode(display=False) as counted:
            checkpoint(run, leaves["x"], tokens, use_reentrant=reentrant).sum().backward()
        counts.append(counted.get_total_flops())
    at_once, in_slices = counts
    thin = 8 + 20  # ranks of gate and up: s, and what they add to both
    more = 2 * 12 * HIDDEN * 2 * SIZE
    if layer == "lora":
        more += 2 * 12 * (HIDDEN * thin + SIZE * thin + 16 * SIZE)
    if reentrant:
        assert in_slices == pytest.approx(at_once + more, rel=0.03)
    else:
        # the thin products of adapters are counted as the forms have them
        assert in_slices <= at_once * (1.03 if layer == "lora" else 1)


@pytest.mark.interpreter
def test_slices_drop_other_features():
    """Of rows that are equal, and every feature now and then."""
    one = torch.eye(HIDDEN, dtype=torch.float16)
    base = torch.zeros_like(one)
    ones = torch.ones(HIDDEN, dtype=torch.float16)
    copied = LoraProjection(base, None, one, one, 1.0, 0.5)
    constant = LoraProjection(base, ones, one, base, 1.0)
    through = LoraProjection(one, None, one, base, 1.0)
    x = torch.ones(200, HIDDEN, dtype=torch.float16)
    masks = (gated_mlp(x, constant, copied, through, slice_tokens=50) != 0).view(4, 50, HIDDEN)
    for i in range(4):
        for j in range(i):
            agree = (masks[i] == masks[j]).double().mean().item()
            assert abs(agree - 0.5) < 5 * (0.25 / masks[i].numel()) ** 0.5
    assert not torch.equal(masks[0].sort(0).values, masks[1].sort(0).values)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter serves float16")
def test_masks_that_are_tensors_run_at_once():
    x, parts = mlp_inputs("cpu", "float64", dropout=0.5)
    runs = [results(seeded(our_mlp("silu", tokens)), x, parts) for tokens in (3, None)]
    torch.testing.assert_close(*runs, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1024, 14336, 28672])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_slices_are_within_their_budget(size, itemsize):
    """Whatever is short runs at once; slices of a long row are nearly equal."""
    most = LONG_BYTES // (5 * size * itemsize)
    assert slice_tokens(most, size, itemsize) is None
    for tokens in (most + 1, 3 * most, 100 * most + 17):
        rows = slice_tokens(tokens, size, itemsize)
        assert rows is not None
        assert rows % 128 == 0
        assert SLICE_BYTES / 2 < rows * 5 * size * itemsize <= SLICE_BYTES
