"""The products of the head that give logits, also with a quantized weight. C: tokens of a chunk, V:
vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.product import product_
from liger_patch.kernels.quantized_weight import QuantizedWeight

SLICE_BYTES = 64 * 2**20  # of a quantized weight at a time: 128 MiB are no faster


def logits_(out: Tensor, operands: HeadInputs) -> Tensor:
    """Write the logits of the C tokens to ``out`` (C, V); all of one dtype."""
    (x, weight), *others = operands.products()
    for classes, part in weight_slices(weight):
        if operands.bias is None:
            torch.mm(x, part.t(), out=out[:, classes])
        else:
            torch.addmm(operands.bias[classes], x, part.t(), out=out[:, classes])
        del part  # before the next one is dequantized
    for x, weight in others:
        for classes, part in weight_slices(weight):
            product_(out[:, classes], x, part.t(), add=True)
    return out


def weight_slices(weight: Tensor | QuantizedWeight) -> Iterator[tuple[slice, Tensor]]:
    """Yield (classes, their rows): a plain weight at once, a quantized one in parts."""
    if isinstance(weight, Tensor):
        yield slice(0, weight.shape[0]), weight
        return
    vocab_size, hidden_size = weight.shape
    rows = SLICE_BYTES // (hidden_size * weight.dtype.itemsize)
    rows = max(1, rows // weight.row_multiple) * weight.row_multiple
    for start in range(0, vocab_size, rows):
        stop = min(start + rows, vocab_size)
        part = weight.rows(start, stop)
        yield slice(start, stop), part
        del part  # before the next, as its readers must
