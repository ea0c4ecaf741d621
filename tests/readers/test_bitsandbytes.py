"""A bitsandbytes weight, dequantized: what the layer itself multiplies with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_weights import assert_rows_are, read
from torch import Tensor, nn

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

from liger_patch.readers.bitsandbytes import stamp  # noqa: E402
from liger_patch.readers.quantized_weights import quantized_weight  # noqa: E402

FLOATS = [torch.bfloat16, torch.float32, torch.float16]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def linear_4bit(
    v: int,
    h: int,
    *,
    device: str = "cpu",
    compute_dtype: torch.dtype | None = torch.bfloat16,
    quant_storage: torch.dtype = torch.uint8,
    **quantisation: Any,
) -> nn.Module:
    head = bnb.nn.Linear4bit(
        h, v, bias=False, compute_dtype=compute_dtype, quant_storage=quant_storage
    )
    weight = torch.randn(v, h, dtype=torch.bfloat16)
    options = {"quant_type": "nf4", "quant_storage": quant_storage, **quantisation}
    head.weight = bnb.nn.Params4bit(weight, requires_grad=False, module=head, **options)
    return head.to(device)


def linear_8bit(v: int, h: int, device: str = "cpu", threshold: float = 0.0) -> nn.Module:
    head = bnb.nn.Linear8bitLt(h, v, bias=False, has_fp16_weights=False, threshold=threshold)
    weight = torch.randn(v, h, dtype=torch.bfloat16)
    head.weight = bnb.nn.Int8Params(weight, requires_grad=False)
    return head.to(device)


def dequantized(head: nn.Module, dtype: torch.dtype) -> Tensor:
    """The whole 4-bit weight, by bitsandbytes: as a vector. Of a matrix whose H is a multiple of 16
    but not of the blocksize, 0.50.2 takes the scales of other blocks on a CPU with AVX-512.
    """
    state = copy.copy(getattr(head.weight, "quant_state", head.quant_state))
    v, h = state.shape
    state.dtype, state.shape = dtype, (-(-v * h // 2) * 2,)
    return bnb.functional.dequantize_4bit(head.weight.detach(), state).view(-1)[: v * h].view(v, h)


def products_weight(head: nn.Module, dtype: torch.dtype) -> Tensor:
    """(V, H): from the layer's own forward on a CPU, which is exact for rows of the identity."""
    eye = torch.eye(head.in_features, dtype=dtype, device=head.weight.device)
    return head.train()(eye).detach().t()


def backward_weight(head: nn.Module, dtype: torch.dtype) -> Tensor:
    """(V, H): from the layer's own backward, likewise."""
    v, h = head.out_features, head.in_features
    x = torch.zeros(v, h, dtype=dtype, device=head.weight.device).requires_grad_()
    head.train()(x).backward(torch.eye(v, dtype=dtype, device=x.device))
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("quant_type", "double_quantized", "shape", "blocksize"),
    [
        ("nf4", False, (131, 72), 64),
        ("nf4", True, (131, 64), 64),
        ("nf4", True, (7, 71), 32),  # an odd number of numbers
        ("nf4", True, (40, 576), 256),
        ("fp4", True, (131, 72), 32),
        ("fp4", False, (40, 576), 64),
    ],
)
def test_4_bit_rows_are_those_of_bitsandbytes(
    quant_type: str, double_quantized: bool, shape: tuple[int, int], blocksize: int, device: str
) -> None:
    head = linear_4bit(
        *shape,
        device=device,
        quant_type=quant_type,
        compress_statistics=double_quantized,
        blocksize=blocksize,
    )
    assert head.weight.quant_state.nested == double_quantized
    for dtype in FLOATS:
        head.compute_dtype = dtype
        assert_rows_are(read(head), dequantized(head, dtype))


@pytest.mark.parametrize("input_dtype", FLOATS)
@pytest.mark.parametrize("compute_dtype", [None, *FLOATS])
@pytest.mark.parametrize("after", [False, True], ids=["before a forward", "after a forward"])
def test_rows_come_in_the_dtype_of_the_layers_product(
    compute_dtype: torch.dtype | None, input_dtype: torch.dtype, after: bool, device: str
) -> None:
    head = linear_4bit(24, 64, device=device, compute_dtype=compute_dtype)
    if after:
        head.train()(torch.ones(1, 64, dtype=torch.bfloat16, device=device))
    weight = read(head, input_dtype)
    expected = compute_dtype or (torch.bfloat16 if after else input_dtype)
    assert weight.dtype == expected
    if device == "cpu":
        rows = weight.dequantized()
        assert torch.equal(rows.to(input_dtype), products_weight(head, input_dtype))


def with_state_of_the_layer(head: nn.Module) -> nn.Module:
    """As after FSDP: only the layer has kept it."""
    head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
    return head


READABLE: dict[str, Callable[[str], nn.Module]] = {
    "many nested blocks": lambda d: linear_4bit(509, 328, device=d),  # 10.2 of 256 scales
    "stored as bfloat16": lambda d: linear_4bit(131, 72, device=d, quant_storage=torch.bfloat16),
    "stored as float32": lambda d: linear_4bit(131, 72, device=d, quant_storage=torch.float32),
    "state of the layer": lambda d: with_state_of_the_layer(linear_4bit(131, 72, device=d)),
    "subclass without a forward": lambda d: bnb.nn.LinearNF4(
        72, 131, bias=False, compute_dtype=torch.bfloat16
    ).to(d),
}


@pytest.mark.parametrize("name", READABLE)
def test_whatever_the_weight_is_stored_as_its_rows_are_read(name: str, device: str) -> None:
    head = READABLE[name](device)
    assert_rows_are(read(head), dequantized(head, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("make", [linear_4bit, linear_8bit])
def test_a_weight_that_was_quantized_on_the_cpu_is_read_where_it_is_now(make: Any) -> None:
    head = make(131, 72)
    truth = read(head).dequantized()
    head.to("cuda")
    weight = quantized_weight(head, torch.bfloat16)
    if weight is None:  # bitsandbytes 0.50 leaves the 8-bit numbers behind
        assert head.weight.CB.device != head.weight.device
    else:
        torch.testing.assert_close(weight.dequantized().cpu(), truth)


def test_a_weight_that_is_packed_later_is_read_as_it_was() -> None:
    head = linear_4bit(64, 128)
    weight, truth = read(head), dequantized(head, torch.bfloat16)
    # what eval() and a forward do on a CPU with AVX-512 for bfloat16
    packed, state = bnb.functional._convert_weight_packed_for_cpu(
        head.weight.data, head.weight.quant_state
    )
    head.weight.data, head.weight.quant_state = packed, state
    assert quantized_weight(head, torch.bfloat16) is None
    assert_rows_are(weight, truth)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_8_bit_rows_are_those_of_the_layers_backward(
    dtype: torch.dtype, threshold: float, device: str
) -> None:
    head = linear_8bit(131, 72, device, threshold)
    before = read(head, dtype)
    assert head.weight.CB is not None
    truth = backward_weight(head, dtype)
    assert head.weight.CB is None
    after = read(head, dtype)
    for weight in (before, after):
        assert_rows_are(weight, truth)


class OwnForward(bnb.nn.Linear4bit):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_own_forward(head: nn.Module) -> nn.Module:
    head.__class__ = OwnForward
    return head


def with_weight_on_meta(head: nn.Module) -> nn.Module:
    head.weight = head.weight.to("meta")  # as accelerate: bitsandbytes cannot move the layer
    return head


def with_scales_lost(head: nn.Module) -> nn.Module:
    head.weight.quant_state = head.quant_state = None
    return head


def with_rows_lost(head: nn.Module) -> nn.Module:
    """As a shard of FSDP."""
    head.weight.data = head.weight.data[:64]
    return head


UNREADABLE = {
    "not quantized yet, 4 bits": lambda: bnb.nn.Linear4bit(72, 131),
    "not quantized yet, 8 bits": lambda: bnb.nn.Linear8bitLt(72, 131, has_fp16_weights=False),
    "8 bits only for products": lambda: bnb.nn.Linear8bitLt(72, 131).to("cpu"),
    "made on meta": lambda: bnb.nn.Linear4bit(72, 131, device="meta"),
    "made on meta, 8 bits": lambda: bnb.nn.Linear8bitLt(
        72, 131, has_fp16_weights=False, device="meta"
    ),
    "moved to meta": lambda: with_weight_on_meta(linear_4bit(131, 72)),
    "a subclass with a forward": lambda: with_own_forward(linear_4bit(131, 72)),
    "moved to meta, 8 bits": lambda: with_weight_on_meta(linear_8bit(131, 72)),
    "scales lost": lambda: with_scales_lost(linear_4bit(131, 72)),
    "rows lost": lambda: with_rows_lost(linear_4bit(131, 72)),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_there_is_no_quantized_weight_of(name: str) -> None:
    assert quantized_weight(UNREADABLE[name](), torch.bfloat16) is None


CHANGES: dict[str, Callable[[Any], object]] = {
    "another weight": lambda layer: setattr(layer, "weight", linear_4bit(40, 64).weight),
    "other scales": lambda layer: setattr(
        layer.weight.quant_state, "absmax", layer.weight.quant_state.absmax.clone()
    ),
    "moved": lambda layer: layer.weight.quant_state.to("meta"),
    "another dtype": lambda layer: setattr(layer, "compute_dtype", torch.float32),
    "packed": lambda layer: vars(layer.weight.quant_state).update(packing_format_for_cpu=True),
    "another forward": lambda layer: setattr(
        layer, "__class__", type("Other", (type(layer),), {"forward": lambda self, x: x})
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_stamp_sees_a_change(name: str) -> None:
    layer = linear_4bit(40, 64)
    before = stamp(layer)
    assert before is not None
    assert before == stamp(layer)
    held = layer.weight, layer.weight.quant_state.absmax  # as what was read holds them
    CHANGES[name](layer)
    assert stamp(layer) != before
    del held


def test_a_weight_is_read_again_where_it_is_now() -> None:
    layer = linear_4bit(40, 64)
    kept: Any = read(layer)
    kept = kept.read_again(numbers=False)
    layer.weight.data = layer.weight.data.flip(0)
    assert_rows_are(kept.read_again(), dequantized(layer, torch.bfloat16))


def test_what_has_no_stamp() -> None:
    assert stamp(nn.Linear(4, 4)) is None
    assert stamp(linear_8bit(40, 64)) is None


def test_4_bits_have_no_float64() -> None:
    assert quantized_weight(linear_4bit(131, 72, compute_dtype=None), torch.float64) is None
