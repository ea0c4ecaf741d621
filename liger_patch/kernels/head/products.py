"""Matrix products into given memory, also from narrow factors into a wider result (float32 from
bf16).
"""

import torch
from torch import Tensor

from liger_patch.kernels.head.inputs import HeadInputs, weight_slices

SLABS = 16  # of rows, where the device cannot write a wider result itself: bounds the copy


def product_(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> Tensor:
    """``out = a @ b``, or ``out += a @ b``: one call and one rounding where the device can."""
    if out.dtype == a.dtype:
        return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    if _writes_float32(a) and out.dtype == torch.float32:
        if add:
            return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    step = max(1, -(-out.shape[0] // SLABS))
    for start in range(0, out.shape[0], step):
        part, slab = out[start : start + step], torch.mm(a[start : start + step], b)
        part.add_(slab) if add else part.copy_(slab)
    return out


def _writes_float32(a: Tensor) -> bool:
    # torch.mm(..., out_dtype=torch.float32) came with torch 2.8, for CUDA devices only
    return a.is_cuda and torch.version.hip is None and hasattr(torch.ops.aten.mm, "dtype_out")


def logits_(out: Tensor, factors: HeadInputs) -> Tensor:
    """``out`` (C, V) becomes the logits of the C tokens; all of one dtype."""
    (x, weight), *others = factors.products()
    for classes, part in weight_slices(weight):
        if factors.bias is None:
            torch.mm(x, part.t(), out=out[:, classes])
        else:
            torch.addmm(factors.bias[classes], x, part.t(), out=out[:, classes])
        del part  # before the next one is dequantised
    for x, weight in others:
        for classes, part in weight_slices(weight):
            product_(out[:, classes], x, part.t(), add=True)
    return out
