"""Models of Transformers' fine-grained FP8 layers with LoRA adapters, beside PEFT's own forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from layer_weights import assert_rows_are, read
from lora_models import MARKS, ROWS, WAYS, adapted, check_precision
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers.integrations import finegrained_fp8 as fp8

if not hasattr(fp8, "_dequantize_fp8_weight"):
    pytest.skip("Transformers trains no adapters on FP8 layers yet", allow_module_level=True)

from liger_patch import apply_patch
from liger_patch.layers.lora import not_plain
from liger_patch.readers import finegrained_fp8
from liger_patch.readers.quantized_weights import quantized_weight

pytestmark = MARKS
# of weights 131 x 72: no block of the second ends with them
BLOCKS = {"whole blocks": (131, 24), "cut blocks": (16, 32), "one scale": None}


def layer_of(weight: Tensor, block: tuple[int, int] | None) -> Any:
    v, h = weight.shape
    layer = fp8.FP8Linear(h, v, block_size=block)
    high, wide = block or (v, h)
    grid = -(-v // high), -(-h // wide)
    scales = weight.float().abs().max() / 448 * (1 + torch.rand(grid))
    full = scales.repeat_interleave(high, 0)[:v].repeat_interleave(wide, 1)[:, :h]
    layer.weight.data = (weight.float() / full).to(torch.float8_e4m3fn)
    layer.weight_scale_inv.data = scales if block else scales[0, 0]
    return layer.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", BLOCKS)
def test_numbers_are_transformers_rounded_once(name: str, dtype: torch.dtype) -> None:
    block = BLOCKS[name]
    layer = layer_of(torch.randn(131, 72), block)
    truth = fp8._dequantize_fp8_weight(layer.weight, layer.weight_scale_inv, block, torch.float32)
    assert_rows_are(read(layer, dtype), truth.to(dtype))


def test_scales_of_powers_of_two() -> None:
    layer = layer_of(torch.randn(131, 72), (16, 32))
    scales = layer.weight_scale_inv.to(torch.float8_e8m0fnu)
    layer.weight_scale_inv = nn.Parameter(scales.float(), requires_grad=False)
    expected = read(layer, torch.bfloat16).dequantized()
    layer.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
    assert torch.equal(read(layer, torch.bfloat16).dequantized(), expected)


def quantized(block: tuple[int, int] | None, dtype: torch.dtype) -> Any:
    """A tiny Llama in FP8 but for its head, as Transformers leaves it."""
    base = tiny_model(ROWS["llama"], dtype=dtype)
    for name, layer in list(base.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            base.set_submodule(name, layer_of(layer.weight.detach(), block))
    return adapted(base=base)


def in_float64(model: Any) -> Any:
    """The same model with the quantized weights written out."""
    wide = copy.deepcopy(model)
    for name, layer in list(wide.named_modules()):
        if isinstance(layer, fp8.FP8Linear):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
            rows = read(layer, torch.float32).dequantized()
            plain.weight = nn.Parameter(rows, requires_grad=False)
            wide.set_submodule(name, plain)
    return wide.double()


def product(x: Tensor, weight: Tensor, scales: Tensor, block: Any, bias: Any, *_: Any) -> Tensor:
    """Stands for the kernels, which no CPU has: without rounding activations, so more exact."""
    assert bias is None
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    rows = fp8._dequantize_fp8_weight(weight, scales, block, dtype)
    return (x.to(dtype) @ rows.t()).to(x.dtype)


@pytest.mark.parametrize("way", ["float32", "autocast", "autocast of float32"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_step_is_that_of_the_dequantized_weights(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT would make 16-bit adapters FP8."""
    monkeypatch.setattr(fp8, "fp8_linear", product)
    check_precision(quantized(BLOCKS[name], WAYS[way][0]), way, monkeypatch, in_float64)


def test_a_model_that_was_not_called_counts_as_under_autocast() -> None:
    assert not_plain(apply_patch(quantized((16, 16), torch.bfloat16))) == {}


def test_what_is_not_read() -> None:
    layer = layer_of(torch.randn(32, 64), (16, 16))
    meta, shard = copy.deepcopy(layer).to("meta"), copy.deepcopy(layer)
    shard.weight.data = shard.weight.data[:16]
    for each in (meta, shard):
        assert "elsewhere" in str(finegrained_fp8.read(each, torch.bfloat16))
    layer.weight.data = layer.weight.data.view(torch.int8)
    assert finegrained_fp8.read(layer, torch.bfloat16) == "the base is an FP8Linear of torch.int8"
    assert quantized_weight(fp8.FP8GroupedLinear(16, 16, 2, (16, 16)), torch.bfloat16) is None
