"""Triton form of a scaling in place whose factor only the device knows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192  # elements of a program's step
MAX_PROGRAMS = 2048  # walking in steps: few enough that returning at once costs microseconds


@triton.jit
def _scale_kernel(values_ptr, factor_ptr, size, stride, BLOCK: tl.constexpr):
    """Programs walk values (size,) together, ``stride`` elements a step; a factor of 1: return."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor == 1.0:
        return
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, stride):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < size
        values = tl.load(values_ptr + offsets, mask=mask).to(tl.float32)
        tl.store(values_ptr + offsets, values * factor, mask=mask)


def scale_(values: Tensor, factor: Tensor) -> Tensor:
    """``values *= factor`` for contiguous values of any shape and a factor of one element."""
    size = values.numel()
    programs = min(MAX_PROGRAMS, -(-size // BLOCK))
    if programs:
        with torch.cuda.device_of(values):
            _scale_kernel[(programs,)](values, factor, size, programs * BLOCK, BLOCK, num_warps=8)  # pyright: ignore[reportCallIssue]
    return values
