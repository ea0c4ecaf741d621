"""Triton form of dequantizing nf4, the 4-bit numbers of bitsandbytes.

    number n = code[nibble n] * scale[n // blocksize]
    scale b = nested_code[stored b] * nested_scale[b // nested_blocksize] + offset

Two numbers lie in a byte, the first in its high half. Scales are stored as they are, or with double
quantization as 8-bit numbers. Each product and the sum is rounded to float32, and the result once
to its dtype, as in bitsandbytes' CUDA kernels: the same bits. Extra memory: none. Source:
bitsandbytes 0.50, ``functional.py`` and ``csrc/kernels.cu``. With another code, and powers of two
for nested scales, they are the numbers of ``kernels/mxfp4``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.triton.launch import launch

# numbers of a program: of 8 warps of 32 threads, each loads 4 bytes at once, and stores its 8
# numbers of 16 bits at once, without an exchange between threads
TILE = 2048
WARPS = 4 if torch.version.hip else 8  # a thread of 64 in a warp stores 8 numbers too


@triton.jit
def _nf4_kernel(
    packed_ptr,  # (ceil(numbers / 2),) uint8
    code_ptr,  # (16,)
    scales_ptr,  # (blocks,), uint8 if they are nested
    nested_code_ptr,  # (256,), None: the scales are as they are stored
    nested_scales_ptr,  # (ceil(blocks / NESTED_BLOCKSIZE),)
    offset_ptr,  # ()
    out_ptr,  # (numbers,)
    numbers,
    BLOCKSIZE: tl.constexpr,
    NESTED_BLOCKSIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,  # a block, or an even part of one
):
    """A tile (ROWS, WIDTH) per program."""
    tile = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, ROWS)
    offsets = rows[:, None] * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
    place = tile * (ROWS * WIDTH // 2) + offsets
    packed = tl.load(packed_ptr + place, mask=place < numbers - numbers // 2, other=0).to(tl.int32)

    number = (tile * ROWS + rows) * WIDTH
    exists = number < numbers
    block = number // BLOCKSIZE
    scales = tl.load(scales_ptr + block, mask=exists, other=0)
    if nested_code_ptr is not None:
        nested = tl.load(nested_scales_ptr + block // NESTED_BLOCKSIZE, mask=exists, other=0.0)
        scales = tl.load(nested_code_ptr + scales.to(tl.int32)) * nested + tl.load(offset_ptr)

    high = tl.load(code_ptr + (packed >> 4)) * scales[:, None]
    low = tl.load(code_ptr + (packed & 15)) * scales[:, None]
    offsets = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    place = tile * (ROWS * WIDTH) + offsets
    tl.store(out_ptr + place, tl.interleave(high, low), mask=place < numbers)


def dequantized(
    packed: Tensor,  # (ceil(numbers / 2),) or (..., 1), uint8
    code: Tensor,  # (16,) float32
    scales: Tensor,  # (ceil(numbers / blocksize),) float32, or uint8 if they are nested
    nested: tuple[Tensor, Tensor, Tensor, int] | None,
    blocksize: int,
    numbers: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the numbers of a weight, (numbers,).

    ``nested`` is what scales of 8 bits are made of: their code (256,), the scales of their blocks
    and the offset (), float32, and their blocksize. All tensors are contiguous and on one device;
    blocksizes are powers of two, ``blocksize`` from 2 on.
    """
    out = torch.empty(numbers, dtype=dtype, device=packed.device)
    nested_code, nested_scales, offset, nested_blocksize = nested or (None, None, None, 1)
    width = min(blocksize, TILE)
    launch(
        _nf4_kernel,
        (-(-numbers // TILE),),
        packed,
        code,
        scales,
        nested_code,
        nested_scales,
        offset,
        out,
        numbers,
        BLOCKSIZE=blocksize,
        NESTED_BLOCKSIZE=nested_blocksize,
        ROWS=TILE // width,
        WIDTH=width,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return out
