"""The Triton kernels of a feed-forward layer with LoRA adapters: many programs, and real shapes."""

from itertools import cycle, product

import pytest
import torch
from layer_checks import ACTIVATIONS
from lora_checks import (
    EVERYTHING,
    HIDDEN,
    RANKS,
    WAYS,
    check,
    eager_mlp,
    mlp_inputs,
    our_mlp,
    results,
)
from slow_cases import slow_but

BOTH = ["gated_lora", "gated_lora_backward_"]


@pytest.fixture
def launches(record) -> list[str]:
    """The launches of the Triton kernels."""
    kernels, found = pytest.importorskip("liger_patch.kernels.triton.gated_lora"), []
    for name in BOTH:
        record(kernels, name, lambda *_, name=name: found.append(name))
    return found


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("ranks", "activation"),
    slow_but(list(zip(RANKS, cycle(ACTIVATIONS))), list(product(RANKS, ACTIVATIONS))),
)
@pytest.mark.parametrize("size", slow_but([200], [128, 200, 9]))
@pytest.mark.parametrize("tokens", slow_but([150, 5], [64, 150, 5]))
def test_kernels_of_several_programs(tokens, size, ranks, activation, launches, monkeypatch):
    """In both directions, in tiles that are full and that are not."""
    from liger_patch.kernels.triton import gated_lora

    monkeypatch.setattr(gated_lora, "PROGRAM_COLUMNS", 128)
    monkeypatch.setattr(gated_lora, "PROGRAM_ROWS", 128)
    x, parts = mlp_inputs("cpu", "float16", (tokens, HIDDEN), ranks, size)
    check(our_mlp(activation), eager_mlp(activation), x, parts, wanted=EVERYTHING)
    assert launches == ([] if ranks == "of 70" else BOTH)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_large_gates_are_finite(launches):
    """Whose exponentials are infinite in float16."""
    x, parts = mlp_inputs("cpu", "float16", (70, HIDDEN))
    parts[0] = parts[0]._replace(weight=parts[0].weight * 60)
    for activation in ACTIVATIONS:
        check(our_mlp(activation), eager_mlp(activation), x, parts)
    assert launches == BOTH * len(ACTIVATIONS)


REAL = {"aligned": (2048, 1024, 2816), "of nothing": (1111, 1000, 2731), "few": (3, 512, 1536)}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
@pytest.mark.parametrize("ranks", ["equal", "unequal", "of 64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("way", ["bfloat16", "float16", "autocast"])
def test_real_shapes(way, activation, ranks, shape, launches):
    """Tiles come through the tensor memory accelerator where the size is a multiple of 8."""
    tokens, hidden_size, size = shape
    x, parts = mlp_inputs("cuda", way, (tokens, hidden_size), ranks, size)
    how = {"wanted": EVERYTHING, "autocast": WAYS[way][2]}
    check(our_mlp(activation), eager_mlp(activation), x, parts, **how)
    assert launches == BOTH


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
@pytest.mark.parametrize("way", ["bfloat16", "float16"])
def test_the_same_inputs_give_the_same_bits(way, shape):
    tokens, hidden_size, size = shape
    x, parts = mlp_inputs("cuda", way, (tokens, hidden_size), size=size)
    runs = [results(our_mlp("silu"), x, parts, wanted=EVERYTHING) for _ in range(2)]
    torch.testing.assert_close(*runs, rtol=0, atol=0)


@pytest.mark.gpu
def test_tiles_and_pointers_give_the_same_numbers(monkeypatch):
    from liger_patch.kernels.triton import gated_lora

    x, parts = mlp_inputs("cuda", "bfloat16", REAL["aligned"][:2], size=REAL["aligned"][2])
    if not gated_lora.takes_descriptors(x.device):
        pytest.skip("needs a tensor memory accelerator")
    tiled = check(our_mlp("silu"), eager_mlp("silu"), x, parts, wanted=EVERYTHING)
    monkeypatch.setattr(gated_lora, "takes_descriptors", lambda device: False)
    ours = check(our_mlp("silu"), eager_mlp("silu"), x, parts, wanted=EVERYTHING)
    torch.testing.assert_close(ours["result 0"], tiled["result 0"], rtol=0, atol=0)
