"""MXFP4, the 4-bit numbers of OCP's Microscaling Formats 1.0, in which gpt-oss is published: blocks
of 32 numbers of one row, with one scale in 8 bits.

    number = VALUES[nibble] * 2 ** (scale - 127)

Two numbers lie in a byte, the first in its high half: as in nf4, whose Triton kernel dequantizes
them. In a checkpoint it is the other way round. Numbers that were dequantized from MXFP4 are
quantized to themselves, bit by bit. Their blocks and scales are the same too, where a block's
largest number is 4 or 6 times its scale: a smaller one leaves several scales to choose from.

Memory in bytes: 0.53125 a number.
"""

import functools
import math

import torch
from torch import Tensor

from liger_patch.kernels.backend import TRITON_DTYPES, serves_triton_device
from liger_patch.kernels.graphs import is_traced

BLOCK = 32  # numbers of a scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*MAGNITUDES, *(-each for each in MAGNITUDES))
LARGEST_EXPONENT = 2  # of MAGNITUDES
BIAS = 127  # of scales
POWERS = (*(2.0 ** (scale - BIAS) for scale in range(255)), math.nan)  # of each scale
ALL_BLOCKS = 2**40  # more than a weight has: nf4's kernel then reads one nested scale


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight to MXFP4, to the nearest number and of two to the even one.

    Args:
        weight: (..., H), floating point. A block that is not finite becomes NaN.

    Returns:
        The packed numbers (..., H / 2) and the scales (..., H / 32), uint8.

    Raises:
        ValueError: H is no multiple of 32.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(
            f"weight must have rows of a multiple of {BLOCK} numbers, got {tuple(weight.shape)}"
        )
    _, powers, *_, boundaries = _tables(weight.device)
    blocks = weight.float().contiguous().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    exponents = torch.frexp(largest).exponent - 1 - LARGEST_EXPONENT
    exponents = exponents.clamp(-BIAS, BIAS).where(largest > 0, -BIAS)
    scaled = blocks * powers[BIAS - exponents][..., None]
    nibbles = torch.bucketize(scaled.abs(), boundaries, out_int32=True)
    nibbles = (nibbles + 8 * torch.signbit(scaled)).to(torch.uint8).flatten(-2)
    packed = (nibbles[..., ::2] << 4) | nibbles[..., 1::2]
    scales = (exponents + BIAS).where(largest.isfinite(), len(POWERS) - 1)
    return packed, scales.to(torch.uint8)


def dequantized(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers (..., H) of a weight in new memory.

    Args:
        packed, scales: what ``quantized`` returns, contiguous.
    """
    shape = *packed.shape[:-1], 2 * packed.shape[-1]
    if packed.is_meta:
        return packed.new_empty(shape, dtype=dtype)
    tables = _tables.__wrapped__ if is_traced() else _tables  # those of a trace are not cached
    values, powers, one, zero, _ = tables(packed.device)
    if serves_triton_device(packed) and not is_traced():
        from liger_patch.kernels.triton import nf4

        made = dtype if dtype in TRITON_DTYPES else torch.float32
        nested = powers, one, zero, ALL_BLOCKS
        out = nf4.dequantized(packed, values, scales, nested, BLOCK, 2 * packed.numel(), made)
        return out.view(shape).to(dtype)
    out = packed.new_empty(shape, dtype=dtype)
    pairs = torch.stack((values.repeat_interleave(16), values.repeat(16)), -1)  # of each byte
    matrices = [each.view(-1, *each.shape[-2:]) for each in (out, packed, scales)]
    for i in range(len(matrices[0])):  # one at a time: places in a table take 4 bytes each
        numbers, own, scale = (each[i] for each in matrices)
        blocks = pairs[own.int()].view(*scale.shape, BLOCK)
        numbers.copy_((blocks * powers[scale.int()][..., None]).view(numbers.shape))
    return out


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, ...]:
    """Return VALUES, POWERS, 1 (1,), 0 (), and the largest number (7,) that is rounded to each of
    MAGNITUDES but the last; float32.
    """
    magnitudes = torch.tensor(MAGNITUDES)
    boundaries = (magnitudes[1:] + magnitudes[:-1]) / 2
    boundaries[1::2] = torch.nextafter(boundaries[1::2], torch.zeros(()))  # to the even one
    tables = torch.tensor(VALUES), torch.tensor(POWERS), torch.ones(1), torch.zeros(()), boundaries
    return tuple(each.to(device) for each in tables)
