"""Experts in 4 bits compute what the model computes with their dequantized weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from dequantized_steps import assert_close, check_checkpoints, check_evaluation, step, with_adapters
from exactness import assert_no_worse, assert_same_bits
from torch import Tensor, nn

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Mxfp4Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from liger_patch import apply_patch, patch_status, quantize_experts, revert_patch

NO_ADAPTERS = "the experts of Qwen3MoeForCausalLM take no adapters from now on"
pytestmark = pytest.mark.filterwarnings(
    "ignore:quantize_experts. the experts of .* take no adapters"
)
NAMES = "gate_up_proj", "down_proj"
HOW: dict[str, dict[str, Any]] = {
    "nf4": {},
    "nf4, scales in float32": {"double_quant": False},
    "mxfp4": {"quant_type": "mxfp4"},
}
LORA = {"r": 4, "target_parameters": [f"mlp.experts.{name}" for name in NAMES]}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}


def mixture(kind: str, dtype: torch.dtype = torch.float32, size: int = 32) -> Any:
    torch.manual_seed(0)
    if kind == "gpt_oss":
        config = GptOssConfig(**SIZES, intermediate_size=size, num_local_experts=4)
        model: Any = GptOssForCausalLM(config)
    else:
        sizes = {"intermediate_size": 32, "moe_intermediate_size": size, "num_experts": 4}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes))
    for each in model.parameters():
        nn.init.normal_(each, std=0.2)
    model.set_experts_implementation("eager")
    return model.to(dtype).train()


def adapted(model: Any) -> Any:
    return with_adapters(model, **LORA)


def experts_of(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if hasattr(each, "in_4_bits")]


def dequantized(model: Any, quantized: Any) -> Any:
    """Return a model with the numbers that a quantized one has, in place of its own."""
    model = copy.deepcopy(model)
    layers = [each for each in model.modules() if NAMES[0] in each._parameters]
    for layer, held in zip(layers, experts_of(quantized), strict=True):
        for name in NAMES:
            own = layer._parameters[name]
            weight = held.in_4_bits[name].dequantized(torch.float32)
            own.data = (weight if layer.is_transposed else weight.transpose(1, 2)).to(own.dtype)
    return model


@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", ""])
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_step_is_that_of_the_dequantized_weights(
    kind: str, how: dict[str, Any], is_patched: bool
) -> None:
    model = adapted(mixture(kind))
    quantized = quantize_experts(copy.deepcopy(model), "cpu", **how)
    truth = step(dequantized(model, quantized))
    if is_patched:
        apply_patch(quantized)
        assert "2 experts" in str(patch_status(quantized))
    ours = step(quantized)
    assert sum("lora" in name for name in ours) >= 8
    assert_close(ours, truth)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_give_the_same(reentrant: bool) -> None:
    model = apply_patch(quantize_experts(adapted(mixture("qwen3_moe")), "cpu"))
    check_checkpoints(model, reentrant)


@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", ""])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_generation_and_disabled_adapters_are_those_of_the_dequantized_weights(
    implementation: str, is_patched: bool
) -> None:
    """On a GPU, Transformers chooses ``batched_mm`` while it generates."""
    model = adapted(mixture("qwen3_moe")).eval()
    quantized = quantize_experts(copy.deepcopy(model), "cpu")
    if is_patched:
        apply_patch(quantized)
    truth = dequantized(model, quantized)
    quantized.set_experts_implementation(implementation)
    check_evaluation(quantized, truth)
    assert "batched_mm" not in str(patch_status(quantized))


def test_a_checkpoint_in_mxfp4_trains_as_it_does_dequantized(tmp_path: Path) -> None:
    """Bit by bit: its weights keep their values, and its scales are held."""
    model, state = mixture("gpt_oss"), {}
    for name, each in model.state_dict().items():
        if not name.endswith(NAMES):
            state[name] = each.to(torch.bfloat16)
            continue
        count, source, features = each.shape
        blocks = torch.randint(256, (count, features, source // 32, 16), dtype=torch.uint8)
        blocks[..., 0] = 0x77  # twice 6: each block has one scale
        state[f"{name}_blocks"] = blocks
        state[f"{name}_scales"] = torch.randint(119, 127, blocks.shape[:3], dtype=torch.uint8)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.config.quantization_config = {"quant_method": "mxfp4"}
    model.config.save_pretrained(tmp_path)

    options: Any = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    loaded = GptOssForCausalLM.from_pretrained(tmp_path, **options)
    loaded.set_experts_implementation("eager")
    model = adapted(loaded)
    quantized = quantize_experts(copy.deepcopy(model), "cpu", quant_type="mxfp4")
    for i, layer in enumerate(experts_of(quantized)):
        for name in NAMES:
            own = state[f"model.layers.{i}.mlp.experts.{name}_scales"]
            assert torch.equal(layer.in_4_bits[name].rows.scales, own)
    truth, ours = (step(apply_patch(each.train())) for each in (model, quantized))
    assert_same_bits(ours, truth)


@pytest.mark.parametrize(("how", "at_most"), [({}, 0.54), (HOW["mxfp4"], 0.53125)], ids=str)
def test_memory_is_half_a_byte_a_number(how: dict[str, Any], at_most: float) -> None:
    model = quantize_experts(mixture("qwen3_moe", torch.bfloat16), "cpu", **how)
    for layer in experts_of(model):
        assert not any(name in layer._parameters for name in NAMES)
        for name in NAMES:
            held = layer.in_4_bits[name]
            parts = list(held.parameters())
            assert not any(each.requires_grad or each.dtype != torch.uint8 for each in parts)
            assert sum(each.nbytes for each in parts) <= at_most * held.shape.numel()


def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    base = mixture("qwen3_moe")
    trained = quantize_experts(adapted(copy.deepcopy(base)), "cpu")
    trained.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base, str(tmp_path), is_trainable=True)
    assert_close(step(quantize_experts(loaded, "cpu")), step(trained))


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_state_is_loaded_onto_other_weights(how: dict[str, Any]) -> None:
    model = quantize_experts(adapted(mixture("qwen3_moe")), "cpu", **how)
    other = adapted(mixture("qwen3_moe"))
    for each in other.parameters():
        each.data.mul_(3.0)
    quantize_experts(other, "cpu", **how).load_state_dict(model.state_dict())
    assert_close(step(other), step(model))


def test_what_needs_the_weights_is_an_error() -> None:
    """Merging would write to a copy, and say nothing."""
    model = quantize_experts(adapted(mixture("qwen3_moe")), "cpu")
    with pytest.raises(RuntimeError, match="held in 4 bits by quantize_experts"):
        model.merge_and_unload()
    wrong: Any = "yes"
    with pytest.raises(ValueError, match="double_quant must be True or False, got 'yes'"):
        quantize_experts(mixture("qwen3_moe"), "cpu", double_quant=wrong)
    with pytest.raises(ValueError, match="device must be a device of PyTorch, got 'gpu'"):
        quantize_experts(mixture("qwen3_moe"), "gpu")
    with pytest.warns(UserWarning, match=NO_ADAPTERS):
        bare = quantize_experts(mixture("qwen3_moe"), "cpu")
    with pytest.raises(ValueError, match="no `target_parameters` found"):  # PEFT's own
        get_peft_model(bare, LoraConfig(**LORA))
    with pytest.raises(ValueError, match="Qwen3MoeForCausalLM without experts"):
        quantize_experts(bare, "cpu")
    with pytest.raises(ValueError, match=r"one of \('nf4', 'fp4', 'mxfp4'\), got 'int4'"):
        quantize_experts(mixture("qwen3_moe"), "cpu", quant_type="int4")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device must be .*no CUDA GPU is, got 'cuda'"):
            quantize_experts(mixture("qwen3_moe"))
    with pytest.raises(TypeError, match=r"model must be a transformers.PreTrainedModel .* got 'x'"):
        quantize_experts("x", "cpu")  # type: ignore[arg-type]
    odd = mixture("qwen3_moe", size=16)
    with pytest.raises(ValueError, match=r"a multiple of 32 numbers, got \(32, 16\)"):
        quantize_experts(odd, "cpu", quant_type="mxfp4")
    step(odd)  # the model stays whole


def test_they_stay_when_the_patch_goes() -> None:
    model = quantize_experts(adapted(mixture("qwen3_moe")), "cpu")
    truth = step(model)
    apply_patch(model)
    revert_patch(model)
    assert_close(step(copy.deepcopy(model)), truth)


@pytest.mark.slow
@pytest.mark.parametrize("how", [None, *HOW.values()], ids=["16 bits", *HOW])
def test_200_steps_have_eagers_losses(how: dict[str, Any] | None) -> None:
    """A larger learning rate lets rounding choose other experts, in eager too."""
    model = adapted(mixture("qwen3_moe"))
    ours = copy.deepcopy(model)
    if how is not None:
        quantize_experts(ours, "cpu", **how)
        model = dequantized(model, ours)
    apply_patch(ours, layers=["experts"])
    assert "2 experts" in str(patch_status(ours))
    truth, eager, found = (losses(each) for each in (copy.deepcopy(model).double(), model, ours))
    assert truth[-1] < truth[0] - 0.1
    assert_no_worse({"": found}, {"": eager}, {"": truth}, torch.float32, eps=4)


def losses(model: Any) -> Tensor:
    texts = torch.randint(64, (4, 4, 24), generator=torch.Generator().manual_seed(0))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer, found = torch.optim.AdamW(trained, lr=1e-3), []
    for i in range(200):
        ids = texts[i % len(texts)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().double())
    return torch.stack(found)
