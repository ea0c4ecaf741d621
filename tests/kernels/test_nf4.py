"""nf4 by the Triton kernel: the same bits as float32 products and sums, each rounded once."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from slow_cases import each_pair
from torch import Tensor

pytest.importorskip("triton")

from kernel_forms import INTERPRETED

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
CODE = torch.tensor(  # bitsandbytes' functional.py, get_4bit_type
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
NESTED_BLOCKSIZE = 256


def made(numbers: int, blocksize: int, nested: bool, device: torch.device) -> tuple[Any, ...]:
    """What the kernel reads: packed numbers, scales, and of nested ones code, scales, offset."""
    blocks = -(-numbers // blocksize)
    packed = torch.randint(256, (-(-numbers // 2),), dtype=torch.uint8)
    if not nested:
        return packed.to(device), torch.rand(blocks).to(device), None
    scales = torch.randint(256, (blocks,), dtype=torch.uint8)
    outer = torch.rand(-(-blocks // NESTED_BLOCKSIZE)).to(device)
    code = torch.linspace(-1.0, 1.0, 256).to(device)
    offset = torch.tensor(1.7).to(device)
    return packed.to(device), scales.to(device), (code, outer, offset, NESTED_BLOCKSIZE)


def truth(
    packed: Tensor, scales: Tensor, nested: Any, blocksize: int, numbers: int, dtype: torch.dtype
) -> Tensor:
    """All numbers, by operations that round each product and each sum to float32."""
    nibbles = torch.stack((packed >> 4, packed & 15), dim=1).view(-1)[:numbers]
    if nested is not None:
        code, outer, offset, nested_blocksize = nested
        scales = code[scales.int()] * outer.repeat_interleave(nested_blocksize)[: len(scales)]
        scales = scales + offset
    values = CODE.to(packed.device)[nibbles.int()]
    products = values * scales.repeat_interleave(blocksize)[:numbers]
    if INTERPRETED and dtype == torch.bfloat16:  # Triton's interpreter cuts, where a GPU rounds
        products = (products.view(torch.int32) & -65536).view(torch.float32)
    return products.to(dtype)


@each_pair(nested=[False, True], blocksize=[32, 64, 256, 4096], dtype=FLOATS)
def test_all_numbers_have_the_same_bits(dtype, blocksize, nested, kernel_device):
    from liger_patch.kernels.triton.nf4 import TILE, dequantized

    code = CODE.to(kernel_device)
    # the first is an odd number, in more blocks of 64 than a nested one has
    for numbers in (6 * TILE + 4097, 1, TILE - 1, 2 * TILE, 2 * TILE + 2):
        packed, scales, inner = made(numbers, blocksize, nested, kernel_device)
        ours = dequantized(packed, code, scales, inner, blocksize, numbers, dtype)
        assert ours.dtype == dtype
        assert torch.equal(ours, truth(packed, scales, inner, blocksize, numbers, dtype)), numbers


@pytest.mark.gpu
@pytest.mark.parametrize("nested", [False, True])
def test_offsets_beyond_2_31(nested):
    from liger_patch.kernels.triton.nf4 import dequantized

    device, numbers, blocksize = torch.device("cuda"), 2**32 + 2**20 + 1, 64
    with device:
        packed, scales, inner = made(numbers, blocksize, nested, device)
        whole = dequantized(
            packed, CODE.to(device), scales, inner, blocksize, numbers, torch.bfloat16
        )
    for begin in (2**31 - 2**16, 2**32 - 2**16, numbers - 2**17 - 1):  # a nested block begins there
        part = slice(begin // blocksize, begin // blocksize + 2**11 + 1)
        nested_part = inner
        if inner is not None:
            code, outer, offset, nested_blocksize = inner
            assert part.start % nested_blocksize == 0
            nested_part = (
                code,
                outer[part.start // nested_blocksize :][:9],
                offset,
                nested_blocksize,
            )
        size = min(2**17 + 1, numbers - begin)
        packed_part = packed[begin // 2 : (begin + size + 1) // 2]
        expected = truth(packed_part, scales[part], nested_part, blocksize, size, torch.bfloat16)
        assert torch.equal(whole[begin : begin + size], expected)


@each_pair(double_quantized=[False, True], shape=[(131, 72), (7, 71), (40, 576)], dtype=FLOATS)
def test_the_kernel_reads_what_bitsandbytes_has_quantized(
    dtype, shape, double_quantized, kernel_device, monkeypatch
):
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from liger_patch.readers import quantized_weights

    v, h = shape
    layer = bnb.nn.Linear4bit(h, v, bias=False, compute_dtype=dtype)
    layer.weight = bnb.nn.Params4bit(
        torch.randn(v, h),
        requires_grad=False,
        quant_type="nf4",
        compress_statistics=double_quantized,
        module=layer,
    )
    layer = layer.to(kernel_device)
    state = layer.weight.quant_state
    nested = None
    if double_quantized:
        inner = state.state2
        nested = inner.code, inner.absmax, state.offset, inner.blocksize
    packed = layer.weight.detach().view(-1)
    expected = truth(packed, state.absmax, nested, 64, v * h, dtype).view(v, h)
    assert torch.equal(state.code.cpu(), CODE)
    refused = Mock(side_effect=AssertionError("bitsandbytes has dequantized"))
    monkeypatch.setattr(bnb.functional, "dequantize_4bit", refused)
    monkeypatch.setattr(bnb.functional, "dequantize_blockwise", refused)
    weight = quantized_weights.quantized_weight(layer, dtype)
    assert weight is not None
    assert torch.equal(weight.dequantized(), expected)
