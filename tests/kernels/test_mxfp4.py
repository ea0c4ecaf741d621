"""MXFP4: the numbers of Transformers' checkpoints bit by bit, and the nearest ones of others."""

import pytest
import torch
from kernel_forms import INTERPRETED
from torch import Tensor

from liger_patch.kernels import mxfp4

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
HAS_MOST = 4.0  # a block's largest number over its scale, from which on the scale is the only one


def checkpoint(scales: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Blocks (E, out, in / 32, 16) and scales as gpt-oss is published in."""
    torch.manual_seed(0)
    blocks = torch.randint(256, (3, 6, 4, 16), dtype=torch.uint8)
    blocks[0, 0, :2] = torch.tensor([[0x00], [0x88]])  # zeros of both signs
    blocks[0, 1] &= 0b1011_1011  # no number is 4 or 6
    exponents = torch.randint(*scales, (3, 6, 4), dtype=torch.uint8)
    if INTERPRETED:  # Triton's interpreter has other subnormal numbers of bf16
        exponents.clamp_(min=2)
    return blocks.to(device), exponents.to(device)


def bits(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


@pytest.mark.parametrize("scales", [(100, 140), (0, 253)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_of_a_checkpoint_are_kept_bit_by_bit(dtype, scales, device):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, exponents = checkpoint(scales, device)
    published = convert_moe_packed_tensors(blocks, exponents, dtype=dtype).transpose(1, 2)
    packed, found = mxfp4.quantized(published)
    ours = mxfp4.dequantized(packed, found, dtype)
    assert torch.equal(bits(ours), bits(published))
    assert published.isfinite().all()

    largest = published.double().abs().unflatten(2, (4, 32)).amax(3) / 2.0 ** (exponents - 127.0)
    is_only = largest >= HAS_MOST
    assert is_only.sum() > 50
    assert not is_only[0, 1].any()
    assert torch.equal(found[is_only], exponents[is_only])
    first_is_low = (packed >> 4) | (packed << 4)
    assert torch.equal(first_is_low.view(blocks.shape)[is_only], blocks[is_only])


@pytest.mark.parametrize("dtype", FLOATS)
def test_dequantized_numbers_are_rounded_once(dtype, device):
    torch.manual_seed(0)
    packed = torch.randint(256, (5, 7, 2 * 16), dtype=torch.uint8)
    scales = torch.randint(105, 135, (5, 7, 2), dtype=torch.uint8)
    nibbles = torch.stack((packed >> 4, packed & 15), -1).flatten(-2).int()
    truth = torch.tensor(mxfp4.VALUES, dtype=torch.float64)[nibbles]
    truth = truth * 2.0 ** (scales.double() - 127).repeat_interleave(32, dim=-1)
    ours = mxfp4.dequantized(packed.to(device), scales.to(device), dtype).cpu()
    assert torch.equal(bits(ours), bits(truth.to(dtype)))


def test_other_numbers_are_rounded_to_the_nearest():
    torch.manual_seed(0)
    x = torch.randn(64, 32, dtype=torch.float64).mul(torch.rand(64, 1) * 20).float()
    x[:, 0] = 6.0 * 2.0 ** torch.arange(-32, 32)  # so the scales are known
    x[0, 1:8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * 2.0**-32  # in the middle
    x[0, 8:15] = -x[0, 1:8]
    x = x.clamp(-x[:, :1], x[:, :1])
    packed, scales = mxfp4.quantized(x)
    assert torch.equal(scales[:, 0].int(), 127 + torch.arange(-32, 32).int())
    ours = mxfp4.dequantized(packed, scales, torch.float64)
    grid = torch.tensor(mxfp4.VALUES) * x[:, :1, None] / 6.0
    nearest = (x[..., None] - grid).abs().amin(-1)
    assert torch.equal((x - ours).abs(), nearest.double())
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]) * 2.0**-32
    assert torch.equal(ours[0, 1:15].float(), torch.cat((even, -even)))


def test_blocks_that_are_not_finite_become_nan():
    x = torch.ones(3, 64)
    x[0, 3], x[1, 40] = torch.nan, -torch.inf
    ours = mxfp4.dequantized(*mxfp4.quantized(x), torch.float32)
    expected = torch.ones(3, 64)
    expected[0, :32] = expected[1, 32:] = torch.nan
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours[2], x[2])


def test_rows_of_other_sizes_are_an_error():
    with pytest.raises(ValueError, match=r"a multiple of 32 numbers, got \(2, 48\)"):
        mxfp4.quantized(torch.ones(2, 48))


def test_without_values_there_are_sizes():
    packed, scales = mxfp4.quantized(torch.randn(2, 3, 64))
    ours = mxfp4.dequantized(packed.to("meta"), scales.to("meta"), torch.bfloat16)
    assert (ours.device.type, ours.shape, ours.dtype) == ("meta", (2, 3, 64), torch.bfloat16)
