"""torchao's weights, tensor subclasses of plain linear layers: a reader of ``quantized_weights``.

The classes dequantize themselves. Where activations keep their dtype, their product is
one with the dequantized weight, which torchao keeps for the backward pass. Source: torchao 0.18,
``quantization/quantize_/workflows``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from liger_patch.readers.quantized_weights import FORWARD, LayerWeight

# the attributes of each class that is read, which are None where activations are not changed
OF_ACTIVATIONS = {
    "Float8Tensor": ("act_quant_kwargs",),
    "Int8Tensor": ("act_quant_kwargs", "act_pre_scale"),
    "IntxUnpackedToInt8Tensor": ("activation_quantization",),
}


class _Weight(LayerWeight):
    def __init__(self, weight: Any, dtype: torch.dtype) -> None:
        super().__init__(weight.qdata.device, weight.shape, dtype)
        self._weight = weight
        self.casts_result = type(weight).__name__ == "Int8Tensor"

    def dequantized(self) -> Tensor:
        # those in 4 bits dequantize in one dtype alone, in their product too
        is_intx = type(self._weight).__name__ == "IntxUnpackedToInt8Tensor"
        with torch.no_grad():
            return self._weight.dequantize(*() if is_intx else (self.dtype,)).to(self.dtype)


def serves(layer: type, weight: type) -> bool:
    """Return whether weights of a class are torchao's, in a layer that only multiplies."""
    return layer is nn.Linear and weight.__module__.partition(".")[0] == "torchao"


def read(layer: Any, dtype: torch.dtype) -> LayerWeight | str:
    """Return the weight of a layer whose input comes in ``dtype``, or why there is none."""
    weight = layer.weight
    name = type(weight).__name__
    if name not in OF_ACTIVATIONS or weight.is_meta:
        return f"the base's weight is a {name}"
    if nn.Linear.forward is not FORWARD:
        return "another function than torch's linear"
    if any(getattr(weight, each, None) is not None for each in OF_ACTIVATIONS[name]):
        return "torchao rounds or scales activations"
    return _Weight(weight, dtype)
