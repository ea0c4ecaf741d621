"""Dropout of linear layers with LoRA adapters: a mask for each projection, drawn again in the
backward pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from layer_checks import lora_linears
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
from slow_cases import pairwise
from torch import Tensor

from liger_patch.kernels.lora.projection import LoraProjection

LINEARS = seeded(lora_linears)


@pytest.mark.parametrize("way", ["float32", "bfloat16", "float16", "autocast"])
def test_dropout_has_one_mask_forward_and_backward(way: str, device: torch.device) -> None:
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


def test_dropout_of_some_projections(device: torch.device) -> None:
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
def test_dropout_kernels_of_several_programs(
    tokens: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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


LAYERS: dict[str, tuple[Layer, Any]] = {
    "linears": (lora_linears, linears_inputs),
    "mlp in slices": (our_mlp("silu", 4), partial(mlp_inputs, bias=True)),
}


@pytest.mark.parametrize(
    ("layer", "reentrant", "way"),
    pairwise(LAYERS, [True, False], ["float64", "float16", "autocast"]),
)
def test_checkpoints_give_the_same_bits(
    layer: str, reentrant: bool, way: str, device: torch.device
) -> None:
    """Features are dropped again."""
    function, inputs = LAYERS[layer]
    x, parts = inputs(device, way, dropout=0.5)
    how = {"autocast": WAYS[way][2], "wanted": "x" if reentrant else ADAPTERS}
    both = checkpointed(function, reentrant), function
    runs = [results(seeded(each), x, parts, **how) for each in both]
    torch.testing.assert_close(*runs, rtol=0, atol=0)
