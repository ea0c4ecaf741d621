"""Random inputs of LoRA operators: shapes of x, and a feed-forward layer of any ranks."""

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
