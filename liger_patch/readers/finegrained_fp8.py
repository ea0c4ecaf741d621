"""Transformers' fine-grained FP8 layers: a reader of ``quantized_weights``.

The weight is e4m3, with a scale for each block of (mostly) 128 x 128 numbers, or one for all. Their
forward rounds activations to e4m3 too, and has kernels for some GPUs; their backward multiplies by
the dequantized weight. A product with these rows is more exact. Source: Transformers 5.24,
``integrations/finegrained_fp8.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8Linear

from liger_patch.readers.quantized_weights import LayerWeight


class _Weight(LayerWeight):
    is_exact = False

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        self._stored = weight = layer.weight
        self._scales = layer.weight_scale_inv
        self._block = weight.shape if self._scales.numel() == 1 else layer.block_size
        super().__init__(weight.device, weight.shape, dtype)

    def dequantized(self) -> Tensor:
        high, wide = self._block
        scales = self._scales.detach().float().view(-1, -(-self.shape[1] // wide))
        rows = self._stored.detach().to(self.dtype)
        scales = scales[torch.arange(len(rows), device=self.device) // high]
        whole = rows.shape[1] // wide
        blocks = rows[:, : whole * wide].unflatten(1, (whole, wide))
        blocks.mul_(scales[:, :whole, None])  # multiplied in float32, rounded once
        rows[:, whole * wide :].mul_(scales[:, whole:])
        return rows


def serves(layer: type, weight: type) -> bool:
    """Return whether layers of a class are Transformers' own FP8 layers, and no subclass."""
    return layer is FP8Linear


def read(layer: Any, dtype: torch.dtype) -> LayerWeight | str:
    """Return the weight of a layer whose input comes in ``dtype``, or why there is none."""
    weight, scales = layer.weight, layer.weight_scale_inv
    if weight.dtype != torch.float8_e4m3fn:  # two FP4 numbers in a byte, or dequantized
        return f"the base is an FP8Linear of {weight.dtype}"
    is_here = weight.device == scales.device and not weight.is_meta
    is_whole = weight.shape == (layer.out_features, layer.in_features)
    if type(weight) is not nn.Parameter or not (is_here and is_whole):
        return "the base is an FP8Linear whose weight is elsewhere"
    return _Weight(layer, dtype)
