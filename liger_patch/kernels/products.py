"""Matrix products that write to a buffer, also to one of a wider dtype, and weights that are
quantized.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

SLABS = 16  # of rows, where the device cannot write a wider result itself: bounds the copy
# torch.mm(..., out_dtype=torch.float32) came with torch 2.8, for CUDA and meta tensors only
_HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype_out")


class QuantizedWeight(ABC):
    """The weight (O, H) of a linear layer, without a gradient, dequantized where it is needed.

    Attributes:
        shape: (O, H).
        dtype, device: of the dequantized weight.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @abstractmethod
    def dequantized(self) -> Tensor:
        """Return (O, H), in new memory."""

    def to(self, dtype: torch.dtype) -> Tensor:
        """Return (O, H) in a dtype, as a tensor does."""
        return self.dequantized().to(dtype)


def product_(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False, alpha: float = 1) -> Tensor:
    """Compute ``out = alpha a @ b`` or ``out += alpha a @ b``, also into a wider dtype, as float32
    from bf16: one call and one rounding where the device can.
    """
    # alpha is an integer by default: with dynamic=True torch.compile traces a float as a symbol
    if not a.numel():  # of a shard without rows
        return out if add else out.zero_()
    beta, is_plain = (1.0 if add else 0.0), not add and alpha == 1.0
    if out.dtype == a.dtype:
        if is_plain:
            return torch.mm(a, b, out=out)
        return torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    on_nvidia = a.is_cuda and torch.version.hip is None
    if out.dtype == torch.float32 and _HAS_OUT_DTYPE and (on_nvidia or a.is_meta):
        if is_plain:
            return torch.mm(a, b, out_dtype=out.dtype, out=out)
        return torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)
    step = max(1, -(-out.shape[0] // SLABS))
    for start in range(0, out.shape[0], step):
        part, rows = out[start : start + step], a[start : start + step]
        slab = rows.new_empty(part.shape)
        torch.addmm(slab, rows, b, beta=0, alpha=alpha, out=slab)
        part.add_(slab) if add else part.copy_(slab)
    return out


def writes_float32(a: Tensor) -> bool:
    """Return True if a product of such operands can be written in float32, unrounded."""
    return a.is_cuda and torch.version.hip is None and _HAS_OUT_DTYPE
