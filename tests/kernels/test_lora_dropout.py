"""Dropout of linear and feed-forward layers with LoRA adapters: a mask for each projection, drawn
again in the backward pass.
"""

from functools import partial
from typing import Any

import pytest
import torch
from exactness import assert_no_worse, assert_same_bits
from layer_checks import ACTIVATIONS, lora_linears
from lora_checks import (
    ADAPTERS,
    EVERYTHING,
    HIDDEN,
    WAYS,
    Layer,
    assert_dropped,
    check,
    checkpointed,
    eager_linear,
    linears_inputs,
    mlp_inputs,
    our_mlp,
    projection,
    results,
    seeded,
)
from slow_cases import each_pair, slow_but
from torch import Tensor

from liger_patch.kernels.backend import HAS_TRITON
from liger_patch.kernels.lora.projection import LoraProjection

LINEARS = seeded(lora_linears)
SQUARE = 24  # features of x, of gate and of y, so that one adapter can copy any of them


@pytest.mark.parametrize("way", ["float32", "bfloat16", "float16", "autocast"])
def test_dropout_has_one_mask_forward_and_backward(way, device):
    """Each projection its own. The masks are read from adapters that only copy x: after the same
    seed, they are drawn alike.
    """
    dtype, adapters, autocast = WAYS[way]
    rates = 0.25, 0.5, 0.75
    x, parts = linears_inputs(device, way, (40, 30, HIDDEN))
    parts = [part._replace(dropout=rate) for part, rate in zip(parts, rates, strict=True)]
    copy = torch.eye(HIDDEN, device=device)
    copies = [
        LoraProjection(torch.zeros_like(copy, dtype=dtype), None, *[copy.to(adapters)] * 2, 1.0, p)
        for p in rates
    ]

    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        masks = [y != 0 for y in LINEARS(torch.ones_like(x), copies)]
    assert_dropped(masks, rates)
    both = (masks[0] & masks[1]).double().mean().item()
    assert abs(both - 0.75 * 0.5) < 5 * (0.25 / masks[0].numel()) ** 0.5  # independent

    def dropped(x: Tensor, parts: Any) -> tuple[Tensor, ...]:
        return tuple(map(eager_linear, [x] * 3, parts, masks))

    check(LINEARS, dropped, x, parts, wanted=EVERYTHING, autocast=autocast)


def test_dropout_of_some_projections(device):
    """Those without draw no mask: theirs are the numbers of no dropout at all."""
    x, parts = linears_inputs(device)
    expected = results(lora_linears, x, parts)
    parts[1] = parts[1]._replace(dropout=0.5)
    ours = results(lora_linears, x, parts)
    names = [name for name in expected if name in ("result 0", "result 2") or name[0] in "02"]
    chosen, same = ({name: run[name] for name in names} for run in (ours, expected))
    assert_no_worse(chosen, same, same, torch.float32)
    assert not torch.allclose(ours["result 1"], expected["result 1"])


@pytest.mark.interpreter
@pytest.mark.parametrize("rank", [1, 16, 20, 64])
@pytest.mark.parametrize("tokens", [64, 150, 5])
def test_dropout_kernels_of_several_programs(tokens, rank, monkeypatch):
    """In both directions, in tiles that are full and that are not: linear in x, so the gradient of
    x is the mask's own.
    """
    dropout = pytest.importorskip("liger_patch.kernels.triton.dropout")
    monkeypatch.setattr(dropout, "PROGRAM_ROWS", 64)
    hidden_size, rate = 70, 0.25
    x = torch.randn(tokens, hidden_size).half()
    base = torch.zeros(hidden_size, hidden_size).half()
    copied = torch.eye(hidden_size).half()
    # 70 features are copied by two adapters, as no tile holds a rank of 70
    parts = [projection(33, hidden_size, rank, dtype=torch.float16, dropout=rate)]
    halves = [
        LoraProjection(base, None, copied[half], copied[:, half], 1.0, rate)
        for half in (slice(0, 35), slice(35, 70))
    ]
    masks = []
    for half in halves:  # each the first to draw after the seed
        (y,) = LINEARS(torch.ones_like(x), [half])
        masks.append(y)
    mask = sum(masks) != 0

    def dropped(x: Tensor, parts: Any) -> tuple[Tensor, ...]:
        return (eager_linear(x, *parts, mask),)

    check(LINEARS, dropped, x, parts, wanted=EVERYTHING)


@pytest.mark.parametrize("activation", slow_but(["gelu_tanh"], list(ACTIVATIONS)))
# float64: in float32, sums in place round more often (torch 2.6 on a CPU: 4 to 17 % too much)
@pytest.mark.parametrize("way", ["float64", "float16", "autocast"])
@pytest.mark.parametrize("slice_tokens", [None, 160])
def test_an_mlp_has_one_mask_for_each_projection(
    slice_tokens, way, activation, device, monkeypatch
):
    """The masks are read from adapters that only copy; after the same seed, they are drawn so."""
    if HAS_TRITON:  # several programs, of several blocks
        for name in ("dropout", "gated_lora"):
            monkeypatch.setattr(f"liger_patch.kernels.triton.{name}.PROGRAM_ROWS", 128)
    dtype, adapters, autocast = WAYS[way]
    rates = 0.25, 0.5, 0.75
    options = {"dtype": dtype, "adapters": adapters, "device": device}
    x = (torch.randn(20, 20, SQUARE) / 2).to(device, dtype)
    parts = [projection(SQUARE, SQUARE, SQUARE, dropout=rate, **options) for rate in rates]
    one, zero = (make(SQUARE, SQUARE, device=device) for make in (torch.eye, torch.zeros))
    ones = torch.ones(SQUARE, device=device, dtype=dtype)
    copied = [LoraProjection(zero.to(dtype), None, *[one.to(adapters)] * 2, 1.0, p) for p in rates]
    constant = [  # 1, whatever x is
        LoraProjection(zero.to(dtype), ones, *[zero.to(adapters)] * 2, 1.0, p) for p in rates
    ]
    through = constant[2]._replace(weight=one.to(dtype), bias=None)

    layer = seeded(our_mlp(activation, slice_tokens))
    masks = []
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        for given in (
            (copied[0], constant[1], through),
            (constant[0], copied[1], through),
            (constant[0], constant[1], copied[2]),
        ):
            masks.append(layer(torch.ones_like(x), given)[0] != 0)
    assert_dropped(masks, rates)

    def dropped(x: Tensor, parts: Any) -> tuple[Tensor]:
        gate, up = (eager_linear(x, parts[i], masks[i]) for i in range(2))
        return (eager_linear(ACTIVATIONS[activation](gate) * up, parts[2], masks[2]),)

    check(layer, dropped, x, parts, wanted=EVERYTHING, autocast=autocast)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("way", ["float64", "float16"])
def test_dropout_of_one_projection_of_an_mlp(way, which, device):
    """Another seed gives other numbers, the same seed the same."""
    x, parts = mlp_inputs(device, way)
    parts[which] = parts[which]._replace(dropout=0.5)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(results(our_mlp("silu"), x, parts, wanted=EVERYTHING))
    assert_same_bits(*runs[:2])
    assert all(value is not None and value.isfinite().all() for value in runs[0].values())
    assert not torch.equal(runs[0]["result 0"], runs[2]["result 0"])


@pytest.mark.parametrize("way", ["float64", "float16"])
def test_dropout_of_an_mlp_of_any_strides(way, device):
    """Of x and of the adapters: the same features are dropped."""
    x, parts = mlp_inputs(device, way, (70, 2 * HIDDEN), dropout=0.5)
    _, parts = mlp_inputs(device, way, dropout=0.5)
    others = [p._replace(a=p.a.t().contiguous().t(), b=p.b.t().contiguous().t()) for p in parts]
    both = (x[:, ::2].contiguous(), parts), (x[:, ::2], others)
    runs = [results(seeded(our_mlp("silu")), *given) for given in both]
    assert_no_worse(runs[1], runs[0], runs[0], torch.float32 if way == "float64" else x.dtype)


LAYERS: dict[str, tuple[Layer, Any]] = {
    "linears": (lora_linears, linears_inputs),
    "mlp in slices": (our_mlp("silu", 4), partial(mlp_inputs, bias=True)),
}


@each_pair(layer=LAYERS, reentrant=[True, False], way=["float64", "float16", "autocast"])
def test_checkpoints_give_the_same_bits(layer, reentrant, way, device):
    """The second forward pass draws the same masks."""
    function, inputs = LAYERS[layer]
    x, parts = inputs(device, way, dropout=0.5)
    how = {"autocast": WAYS[way][2], "wanted": "x" if reentrant else ADAPTERS}
    both = checkpointed(function, reentrant), function
    runs = [results(seeded(each), x, parts, **how) for each in both]
    torch.testing.assert_close(*runs, rtol=0, atol=0)
