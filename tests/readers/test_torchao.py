"""Models that torchao has quantized, with LoRA adapters, beside PEFT's own forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_weights import assert_rows_are, read
from lora_models import MARKS, ROWS, WAYS, adapted, batch_of, check_precision, training_step
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

ao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

from liger_patch import apply_patch  # noqa: E402
from liger_patch.layers.lora import not_plain  # noqa: E402
from liger_patch.readers import torchao  # noqa: E402
from liger_patch.readers.quantized_weights import quantized_weight  # noqa: E402

# of PEFT, about a model that Transformers has not quantized: it cannot be merged
NO_MERGE = "ignore:TorchaoLoraLinear was instantiated without:UserWarning"
pytestmark = [*MARKS, pytest.mark.filterwarnings(NO_MERGE)]
# a weight of 131 x 64 in each; the last two have blocks within a row, and of several rows
FORMATS: dict[str, Callable[[], Any]] = {
    "int8": ao.Int8WeightOnlyConfig,
    "int8 in groups": lambda: ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(16)),
    "float8": ao.Float8WeightOnlyConfig,
    "int4": lambda: ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(16)),
}


def layer_of(name: str, v: int = 131, h: int = 64, dtype: torch.dtype = torch.bfloat16) -> Any:
    layer = nn.Linear(h, v, bias=False, dtype=dtype)
    ao.quantize_(layer, FORMATS[name]())
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_those_of_the_whole_weight(name: str, dtype: torch.dtype) -> None:
    layer = layer_of(name, dtype=dtype)
    assert_rows_are(read(layer, dtype), layer.weight.dequantize())


def test_blocks_of_rows_and_one_scale_for_all() -> None:
    numbers = torch.randn(256, 128, dtype=torch.bfloat16)
    layer = nn.Linear(128, 256, bias=False, dtype=torch.bfloat16)
    for granularity in (ao.PerBlock((128, 128)), ao.PerTensor()):
        weight = ao.Float8Tensor.from_hp(numbers, granularity=granularity)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        assert_rows_are(read(layer), weight.dequantize())


def quantized(name: str, dtype: torch.dtype, *, adapters: bool, **options: Any) -> Any:
    """A tiny Llama in the format but for its head, as libraries leave it."""
    base = tiny_model(ROWS["llama"], dtype=dtype)
    base.requires_grad_(False)
    ao.quantize_(base.model, FORMATS[name]())
    return adapted(base=base, dtype=dtype, wide_adapters=adapters, **options)


def in_float64(model: Any) -> Any:
    """The same model with the quantized weights written out, by torchao."""
    wide = copy.deepcopy(model)
    for layer in wide.modules():
        weight = layer._parameters.get("weight")
        if torchao.serves(type(layer), type(weight)):
            layer.weight = nn.Parameter(weight.dequantize().double(), requires_grad=False)
    return wide.double()


@pytest.mark.parametrize("way", [way for way in WAYS if "without" not in way])
@pytest.mark.parametrize("name", FORMATS)
def test_a_step_is_that_of_the_dequantized_weights(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, adapters, _ = WAYS[way]
    check_precision(quantized(name, dtype, adapters=adapters), way, monkeypatch, in_float64)


def test_no_dense_weight_waits_for_the_backward_pass() -> None:
    batch_bytes = []
    for patch in (False, True):
        model = quantized("int8", torch.bfloat16, adapters=False)
        if patch:
            apply_patch(model)
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            if tensor.shape[-2:] in {(32, 48), (48, 32)}:  # of gate, up and down, or transposed
                kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            training_step(model, batch_of(model))
        batch_bytes.append(sum(kept.values()))
    assert batch_bytes[0] > 0
    assert batch_bytes[1] == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model(ROWS["llama"]).save_pretrained(folder)
    return folder


def loaded(checkpoint: Path, config: Any) -> Any:
    pytest.importorskip("accelerate")
    from transformers import TorchAoConfig

    return AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=TorchAoConfig(config), device_map={"": "cpu"}
    )


def logits_of(model: Any) -> Tensor:
    return model(**batch_of(model)).logits.detach()


def test_disabled_and_merged_adapters_are_pefts(checkpoint: Path) -> None:
    model = adapted(base=loaded(checkpoint, ao.Int8WeightOnlyConfig()))
    patched = apply_patch(copy.deepcopy(model), layers=["lora"])
    with model.disable_adapter(), patched.disable_adapter():
        assert torch.equal(logits_of(patched), logits_of(model))
    before = logits_of(patched)
    for each in (model, patched):
        each.merge_adapter()
    assert torch.equal(logits_of(patched), logits_of(model))
    assert not_plain(patched) == {"adapters are merged": 14}
    patched.unmerge_adapter()  # to weights that were rounded twice
    assert not torch.equal(logits_of(patched), before)
    assert not_plain(patched) == {}


@pytest.mark.filterwarnings("ignore:liger_patch. PEFT.s own forward runs")
def test_rounded_activations_are_left_to_torchao(checkpoint: Path) -> None:
    model = adapted(base=loaded(checkpoint, ao.Int8DynamicActivationInt8WeightConfig()))
    patched = apply_patch(copy.deepcopy(model), layers=["lora"])
    assert torch.equal(logits_of(patched), logits_of(model))
    assert not_plain(patched) == {"torchao rounds or scales activations": 14}


@pytest.mark.filterwarnings("ignore:liger_patch:UserWarning")
def test_a_replaced_forward_of_linear_layers_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    own = nn.Linear.forward
    model = quantized("int8", torch.float32, adapters=True)
    patched = apply_patch(copy.deepcopy(model), layers=["lora"])
    before = logits_of(patched)
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, x: own(layer, x) * 1.5)
    assert torch.equal(logits_of(patched), logits_of(model))
    assert not torch.equal(logits_of(patched), before)
    assert not_plain(patched) == {"another function than torch's linear": 14}


class Other(Tensor):
    """A weight in a format that is not read."""

    __module__ = "torchao.quantization"


def test_what_is_not_read() -> None:
    layer = layer_of("int8")
    layer.weight.act_pre_scale = torch.ones(64)
    assert torchao.read(layer, torch.bfloat16) == "torchao rounds or scales activations"
    layer.weight = nn.Parameter(torch.randn(131, 64).as_subclass(Other), requires_grad=False)
    assert torchao.read(layer, torch.bfloat16) == "the base's weight is a Other"
    assert torchao.read(layer_of("int8").to("meta"), torch.bfloat16) != ""
    assert quantized_weight(layer_of("int8").to("meta"), torch.bfloat16) is None
