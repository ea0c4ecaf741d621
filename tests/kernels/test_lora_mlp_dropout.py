"""Dropout in the adapters of a gated feed-forward layer: one mask, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import assert_no_worse, assert_same_bits
from layer_checks import ACTIVATIONS
from lora_checks import (
    EVERYTHING,
    HIDDEN,
    WAYS,
    assert_dropped,
    check,
    eager_linear,
    mlp_inputs,
    our_mlp,
    projection,
    results,
    seeded,
)
from slow_cases import slow_but
from torch import Tensor

from liger_patch.kernels.backend import HAS_TRITON
from liger_patch.kernels.lora.projection import LoraProjection

SQUARE = 24  # features of x, of gate and of y, so that one adapter can copy any of them


@pytest.mark.parametrize("activation", slow_but(["gelu_tanh"], list(ACTIVATIONS)))
# float64: in float32, sums in place round more often (torch 2.6 on a CPU: 4 to 17 % too much)
@pytest.mark.parametrize("way", ["float64", "float16", "autocast"])
@pytest.mark.parametrize("slice_tokens", [None, 160])
def test_dropout_has_one_mask_forward_and_backward(
    slice_tokens: int | None,
    way: str,
    activation: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
def test_dropout_of_one_projection(way: str, which: int, device: torch.device) -> None:
    """Another seed gives other numbers, the same seed the same."""
    x, parts = mlp_inputs(device, way)
    parts[which] = parts[which]._replace(dropout=0.5)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(results(our_mlp("silu"), x, parts, wanted=EVERYTHING))
    assert_same_bits(*runs[:2])
    assert all(value is not None and value.isfinite().all() for value in runs[0].values())
    assert not torch.equal(runs[0]["result 0"], runs[2]["result 0"])  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["float64", "float16"])
def test_dropout_of_any_strides(way: str, device: torch.device) -> None:
    """Of x and of the adapters: the same features are dropped."""
    x, parts = mlp_inputs(device, way, (70, 2 * HIDDEN), dropout=0.5)
    _, parts = mlp_inputs(device, way, dropout=0.5)
    others = [p._replace(a=p.a.t().contiguous().t(), b=p.b.t().contiguous().t()) for p in parts]
    both = (x[:, ::2].contiguous(), parts), (x[:, ::2], others)
    runs = [results(seeded(our_mlp("silu")), *given) for given in both]
    assert_no_worse(runs[1], runs[0], runs[0], torch.float32 if way == "float64" else x.dtype)
