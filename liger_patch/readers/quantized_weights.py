"""Linear layers that a library holds quantized: the weight, dequantized.

Each format has a reader, a module of READERS, imported only where its library is loaded:

- ``serves(layer, weight)`` returns whether it reads linear layers of one class whose weight is of
  another;
- ``read(layer, dtype)`` returns the weight for an input in a dtype, a ``LayerWeight`` or an
  ``Fp8Weight``, or the reason why there is none;
- ``stamp(layer)`` (optional) returns what ``read`` depends on beside the dtype. While it is equal,
  the weight can be ``read_again``: it keeps the objects whose ids are in the stamp alive. Without
  a stamp, or if it is None, each call reads anew.

V: rows of the weight, H: its columns.
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from typing import Any

import torch
from torch import nn

from liger_patch.kernels.products import QuantizedWeight

READERS = {  # and the module that is loaded where there are such layers
    "liger_patch.readers.bitsandbytes": "bitsandbytes",
    "liger_patch.layers.quantized_base": "liger_patch.layers.quantized_base",
    "liger_patch.readers.finegrained_fp8": "transformers.integrations.finegrained_fp8",
    "liger_patch.readers.torchao": "torchao",
}
FORWARD = nn.Linear.forward  # torch's own: a library may replace it later


class LayerWeight(QuantizedWeight):
    """The weight (V, H) of a quantized linear layer.

    It is a snapshot: it does not see when the layer is moved or packed later.

    Attributes:
        shape: (V, H) of the dequantized weight.
        dtype: of the dequantized weight, and of the layer's product with it.
        device: of the quantized numbers and of the dequantized weight.
        casts_result: whether the layer casts its product to the dtype of its input.
        is_exact: whether the layer multiplies by this weight, and does not round its input.
    """

    casts_result = is_exact = True

    def __init__(self, device: torch.device, shape: torch.Size, dtype: torch.dtype) -> None:
        self.device, self.shape, self.dtype = device, shape, dtype


def reader_of(layer: nn.Module) -> Any:
    """Return the reader that serves a layer; None for a layer that is not quantized, or not in a
    format that is read.
    """
    return _reader(type(layer), type(layer._parameters.get("weight")))


@functools.cache
def _reader(layer: type, weight: type) -> Any:
    for name, library in READERS.items():
        if sys.modules.get(library) is not None:  # None forbids an import
            reader = import_module(name)
            if reader.serves(layer, weight):
                return reader
    return None


def quantized_weight(layer: nn.Module, dtype: torch.dtype) -> LayerWeight | None:
    """Return the weight of a quantized linear layer whose input comes in ``dtype``; None where its
    reader has none, or an ``Fp8Weight``. Where ``is_exact`` is False, the layer itself computes
    something less exact. Hooks and autocast are not considered.
    """
    reader = reader_of(layer)
    weight = reader and reader.read(layer, dtype)
    return weight if isinstance(weight, LayerWeight) else None
