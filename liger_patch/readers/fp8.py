"""The layers of ``quantize_base``: a reader of ``quantized_weights``."""

from typing import Any

from torch import nn

from liger_patch.kernels.fp8 import Fp8Weight

LAYER = "liger_patch.layers.quantized_base", "Fp8Linear"  # layers import readers


def serves(layer: type, weight: type) -> bool:
    """Return whether layers of a class hold their weight in FP8."""
    return any((each.__module__, each.__name__) == LAYER for each in layer.__mro__)


def read(layer: Any, dtype: Any) -> Fp8Weight:
    """Return the weight for products in a dtype."""
    return layer.held(dtype)


def stamp(layer: nn.Module) -> tuple[int, int]:
    """Return what tells whether the layer holds other tensors."""
    return id(layer._parameters.get("qweight")), id(layer._buffers["scales"])
