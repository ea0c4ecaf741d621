"""The weights of quantized layers, as their readers return them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_patch.readers.quantized_weights import LayerWeight, quantized_weight


def read(layer: nn.Module, dtype: torch.dtype = torch.bfloat16) -> LayerWeight:
    weight = quantized_weight(layer, dtype)
    assert weight is not None
    return weight


def assert_rows_are(weight: LayerWeight, truth: Tensor) -> None:
    """Bit for bit."""
    assert (weight.shape, weight.dtype, weight.device) == (truth.shape, truth.dtype, truth.device)
    rows = weight.dequantized()
    assert (rows.dtype, rows.requires_grad) == (truth.dtype, False)
    assert rows.is_contiguous()
    assert torch.equal(rows, truth)
