"""Random inputs of LoRA operators: shapes of x, linear layers, feed-forward layers of any ranks."""

from __future__ import annotations

from typing import Any

import torch
from lora_checks import WAYS, projection
from torch import Tensor

from liger_patch.kernels.lora.projection import LoraProjection

HIDDEN, SIZE = 40, 56
SHAPES = {
    "batch": (5, 7, HIDDEN),
    "row": (HIDDEN,),
    "three": (2, 3, 5, HIDDEN),
    "none": (0, HIDDEN),
    "none of a batch": (2, 0, HIDDEN),
}
RANKS = {
    "equal": (16, 16, 16),
    "unequal": (8, 20, 16),
    "of 1": (1, 1, 1),
    "of 64": (64, 1, 33),
    "of 70": (8, 16, 70),  # more than a tile of the Triton form holds
}


# (O, R, whether it has a bias) of each projection
PROJECTIONS = {
    "one": ((56, 16, False),),
    "one with a bias": ((33, 8, True),),
    "of unequal ranks": ((56, 8, True), (24, 16, False), (24, 20, True)),
    "of rank 1": ((56, 1, False), (24, 1, True)),
    "of large ranks": ((56, 64, False), (24, 70, False)),
}


def linears_inputs(
    device: Any, way: str = "float64", shape: Any = "batch", which: str = "", **how: Any
) -> tuple[Tensor, list[LoraProjection]]:
    """Return x, and some of PROJECTIONS; ``how`` as of ``projection``."""
    dtype, adapters, _ = WAYS[way]
    x = (torch.randn(SHAPES.get(shape, shape)) / 2).to(device, dtype)
    sizes = PROJECTIONS[which or "of unequal ranks"]
    options = {"dtype": dtype, "adapters": adapters, "device": device, **how}
    parts = [projection(o, HIDDEN, rank, bias=bias, **options) for o, rank, bias in sizes]
    return x, parts


def mlp_inputs(
    device: Any,
    way: str = "float64",
    shape: Any = "batch",
    ranks: str = "unequal",
    size: int = SIZE,
    **how: Any,
) -> tuple[Tensor, list[LoraProjection]]:
    """Return x, and the projections gate, up and down; ``how`` as of ``projection``."""
    dtype, adapters, _ = WAYS[way]
    x = (torch.randn(SHAPES.get(shape, shape)) / 2).to(device, dtype)
    hidden_size = x.shape[-1]
    sizes = (size, hidden_size), (size, hidden_size), (hidden_size, size)
    options = {"dtype": dtype, "adapters": adapters, "device": device, **how}
    each = zip(sizes, RANKS[ranks], strict=True)
    return x, [projection(*features, rank, **options) for features, rank in each]
