"""Products with weights in FP8 (e4m3, arXiv:2209.05433), one float32 scale a row.

    weight = diag(w) W          y = diag(x) (X W') diag(w)          dx = diag(g) (G W)

X and W are numbers in e4m3, x and w the scales of their rows. In dx, w belongs to the columns of
the upstream gradient: they are multiplied by it before they are rounded to G with the scales g, so
that both passes read the same numbers of the weight. Where several linear layers read one input,
their gradients lie side by side in G, and dx is one product with sums in float32.

GPUs multiply e4m3 only along rows that lie in memory as such: for dx, W is transposed at each use.
Elsewhere, and beside other dtypes than bf16, products read the dequantized weight, and no
activation is rounded.

N: tokens, H: columns of a weight, O: rows. Memory in bytes: H O + 4 O. Extra memory: forward N H,
backward the sums over layers of N O + H O.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import contiguous_features, serves_triton_device
from liger_patch.kernels.products import QuantizedWeight

scaled_mm: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
LEAST_SCALE = 2.0**-100  # so that its inverse is finite
MULTIPLE = 16  # of both sizes of a weight, as GPUs multiply it
MATRICES = 4  # side by side


class Fp8Rows(NamedTuple):
    """Rows in e4m3: numbers (N, H), and scales (N, 1) in float32."""

    numbers: Tensor
    scales: Tensor


class Fp8Weight(QuantizedWeight):
    """A weight (O, H) in e4m3.

    Args:
        stored: (O, H) uint8, the numbers' bytes.
        scales: (O,) float32, or as integers of the same bits.
        dtype: of products with it.
    """

    casts_result = False

    def __init__(self, stored: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.stored, self._scales, self.dtype = stored, scales, dtype
        self.shape, self.device = stored.shape, stored.device

    @property
    def numbers(self) -> Tensor:
        return self.stored.view(FP8)

    @property
    def scales(self) -> Tensor:
        return self._scales.view(torch.float32)

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Return True if products of operands in a dtype run in FP8."""
        return dtype == torch.bfloat16 and has_fp8(self.device)

    def dequantized(self) -> Tensor:
        """Return (O, H), in new memory."""
        return self.numbers.to(self.dtype).mul_(self.scales[:, None])

    def read_again(self, *, numbers: bool = True) -> Fp8Weight:
        """Return the weight as it is now, of a layer that has the same tensors."""
        return self


def quantized(matrices: Sequence[Tensor], factors: Sequence[Tensor | None] = (None,)) -> Fp8Rows:
    """Round matrices of the same rows to e4m3 side by side, with one scale a row.

    Args:
        matrices: (N, columns of each), up to MATRICES.
        factors: (columns of each,) float32, that columns are multiplied by first; None for 1.

    Returns:
        (N, sum of columns): rows that are not finite have numbers or a scale that are not.
    """
    x, *_ = matrices
    # Triton converts to e4m3 where the GPU does
    if serves_triton_device(x) and len(x) and (x.device.type == "cpu" or has_fp8(x.device)):
        from liger_patch.kernels.triton.fp8 import quantize_rows

        matrices = [contiguous_features(each) for each in matrices]
        return Fp8Rows(*quantize_rows(matrices, factors))
    pairs = zip(matrices, factors, strict=True)
    each = [x.float() if factor is None else x.float() * factor for x, factor in pairs]
    x = each[0] if len(each) == 1 else torch.cat(each, 1)
    scales = (x.abs().amax(1, keepdim=True) / LARGEST).clamp_min(LEAST_SCALE)
    return Fp8Rows((x * (1.0 / scales)).clamp(-LARGEST, LARGEST).to(FP8), scales)


def transposed(weights: Sequence[Fp8Weight]) -> Tensor:
    """Return the numbers of weights side by side, transposed: (H, sum of O)."""
    sizes = [each.shape[0] for each in weights]
    stored = weights[0].stored
    out = stored.new_empty(stored.shape[1], sum(sizes))
    for each, columns in zip(weights, out.split(sizes, 1), strict=True):
        if serves_triton_device(stored):
            from liger_patch.kernels.triton.fp8 import transpose_

            transpose_(columns, each.stored)
        else:
            columns.copy_(each.stored.t())
    return out.view(FP8)


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Return True if PyTorch multiplies e4m3 with scales of rows on a device. It is tried: which
    GPUs do depends on the version.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return False
    numbers = torch.zeros(MULTIPLE, MULTIPLE, dtype=FP8, device=device)
    scales = torch.ones(MULTIPLE, 1, device=device)
    try:
        scaled_product(Fp8Rows(numbers, scales), numbers, scales.view(-1))
    except torch.OutOfMemoryError:  # says nothing of the GPU
        raise
    except (RuntimeError, ValueError):  # how versions and GPUs without such a product refuse it
        return False
    return True


def scaled_product(
    x: Fp8Rows,  # (N, K)
    numbers: Tensor,  # (M, K) e4m3
    scales: Tensor,  # (M,) float32
    bias: Tensor | None = None,  # (M,) bf16
    out: Tensor | None = None,  # (N, M) bf16
) -> Tensor:
    """Return (N, M) in bf16, of sums in float32."""
    if out is None:
        out = x.numbers.new_empty(len(x.numbers), len(numbers), dtype=torch.bfloat16)
    if len(out):
        how = {"bias": bias, "out_dtype": out.dtype, "use_fast_accum": False, "out": out}
        scaled_mm(x.numbers, numbers.t(), scale_a=x.scales, scale_b=scales[None], **how)
    return out


@functools.lru_cache(16)
def _ones(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, device=device)


def input_gradient(
    dys: Sequence[Tensor],  # (N, O) each
    weights: Sequence[Fp8Weight],
    out: Tensor | None = None,  # (N, H) bf16, which may be written to
) -> Tensor:
    """Return dx (N, H) through weights of the same input, in bf16."""
    total = None
    for i in range(0, len(dys), MATRICES):
        some = weights[i : i + MATRICES]
        g = quantized(dys[i : i + MATRICES], [each.scales for each in some])
        ones = _ones(some[0].shape[1], some[0].device)
        dx = scaled_product(g, transposed(some), ones, out=out if total is None else None)
        total = dx if total is None else total.add_(dx)
    assert total is not None
    return total
