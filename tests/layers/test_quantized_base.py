"""Linear layers in FP8 compute what the model computes with their dequantized weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dequantized_steps import assert_close, check_checkpoints, check_evaluation, step, with_adapters
from exactness import assert_no_worse
from peft import LoraConfig, PeftModel
from tiny_models import tiny_model
from torch import nn
from transformers import (
    JambaConfig,
    JambaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from liger_patch import apply_patch, patch_status, quantize_base, revert_patch
from liger_patch.kernels import fp8
from liger_patch.layers.quantized_base import Fp8Linear

pytestmark = pytest.mark.filterwarnings("ignore:Could not find a config file in:UserWarning")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LAYERS = 14  # of two decoder layers


def base(dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "attention_bias": True, **sizes}))
    for each in model.parameters():
        if each.dim() > 1:
            nn.init.normal_(each, std=0.2)
    return model.to(dtype).train()


def adapted(model: Any, **options: Any) -> Any:
    return with_adapters(model, **{"r": 16, "target_modules": "all-linear", **options})


def held(model: nn.Module) -> dict[str, Fp8Linear]:
    return {n: each for n, each in model.named_modules() if isinstance(each, Fp8Linear)}


def dequantized(model: Any, quantized: Any) -> Any:
    """Return a model with the numbers that a quantized one has, in place of its own."""
    model = copy.deepcopy(model)
    for name, layer in held(quantized).items():
        own = model.get_submodule(name)
        own.weight.data = layer.held(own.weight.dtype).dequantized()
    return model


@pytest.mark.parametrize("layers", [False, ["lora", "gated"]], ids=["", "kernels"])
@pytest.mark.parametrize("comes", ["before", "behind"])
def test_a_step_is_that_of_the_dequantized_weights(comes: str, layers: Any) -> None:
    model = adapted(base())
    if comes == "before":
        quantized = adapted(quantize_base(base()))
    else:
        quantized = quantize_base(copy.deepcopy(model))
    truth = step(dequantized(model, quantized))
    assert len(held(quantized)) == LAYERS
    assert len(truth) == 1 + 2 * LAYERS
    ours = step(apply_patch(quantized, layers=layers))
    if layers:
        assert "14 lora" in str(patch_status(quantized))
        assert "PEFT" not in str(patch_status(quantized))
    assert_close(ours, truth)
    assert_close(step(revert_patch(quantized)), truth)


@pytest.mark.parametrize("layers", [False, ["lora", "gated"]], ids=["", "kernels"])
def test_under_autocast_it_is_no_worse_than_eager(layers: Any) -> None:
    model = adapted(base(torch.bfloat16))
    quantized = apply_patch(quantize_base(copy.deepcopy(model)), layers=layers)
    model = dequantized(model, quantized)
    eager = step(model, autocast=True)
    truth = step(model.double())
    ours = step(quantized, autocast=True)
    assert {k: v.dtype for k, v in ours.items()} == {k: v.dtype for k, v in eager.items()}
    assert_no_worse(ours, eager, truth, torch.bfloat16, eps=2)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layers", [False, ["lora", "gated"]], ids=["", "kernels"])
def test_checkpoints_give_the_same(layers: Any, reentrant: bool) -> None:
    model = apply_patch(quantize_base(adapted(base())), layers=layers)
    check_checkpoints(model, reentrant)


def test_without_adapters_and_with_disabled_ones() -> None:
    model = adapted(base()).eval()
    quantized = apply_patch(quantize_base(copy.deepcopy(model)), layers=["lora", "gated"])
    check_evaluation(quantized, dequantized(model, quantized))


def test_its_own_forward_has_the_gradients_of_input_and_bias() -> None:
    torch.manual_seed(0)
    layer: Any = quantize_base(base(num_hidden_layers=1)).model.layers[0].self_attn.q_proj
    plain = nn.Linear(32, 64, dtype=torch.float64)
    plain.weight.data = layer.held(torch.float64).dequantized()
    plain.bias.data = layer.bias.data.double()
    layer.bias.requires_grad_()
    x = torch.randn(2, 3, 32)
    wide = x.double().requires_grad_()
    y, truth = layer(x.requires_grad_()).add_(1.0), plain(wide) + 1.0  # which others may write to
    upstream = torch.randn(2, 3, 64)
    y.backward(upstream)
    truth.backward(upstream.double())
    for ours, expected in ((y, truth), (x.grad, wide.grad), (layer.bias.grad, plain.bias.grad)):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, expected.float(), rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"no second derivative.*16 bits for that"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_memory_is_a_byte_a_number_and_four_a_row() -> None:
    model = quantize_base(base(torch.bfloat16))
    for layer in held(model).values():
        parameters = [each for name, each in layer.named_parameters() if name != "bias"]
        assert [(each.dtype, each.requires_grad) for each in parameters] == [(torch.uint8, False)]
        o, h = layer.out_features, layer.in_features
        size = sum(each.nbytes for each in (*parameters, *layer.buffers()))
        assert size == o * h + 4 * o


def test_which_layers_are_held() -> None:
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=32, num_experts=16, mlp_only_layers=[1])
    model: Any = Qwen3MoeForCausalLM(config)
    model.model.layers[0].mlp.router = nn.Sequential(nn.Linear(32, 16))
    model.model.layers[0].mlp.odd = nn.Linear(32, 24)
    names = held(quantize_base(adapted(model, target_modules=["q_proj", "o_proj", "lm_head"])))
    short = sorted(name.removeprefix("base_model.model.model.layers.") for name in names)
    attention = [
        "self_attn.k_proj",
        "self_attn.o_proj.base_layer",
        "self_attn.q_proj.base_layer",
        "self_attn.v_proj",
    ]
    mlp = ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
    assert short == [*(f"0.{n}" for n in attention), *(f"1.{n}" for n in (*mlp, *attention))]


def jamba() -> Any:
    sizes = {"num_experts": 1, "expert_layer_offset": 8, "expert_layer_period": 9}
    mixers = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 16}
    return JambaForCausalLM(JambaConfig(**SIZES, **sizes, **mixers, use_mamba_kernels=False))


@pytest.mark.parametrize("make", [lambda: tiny_model("t5"), jamba], ids=["t5", "jamba"])
def test_code_that_reads_a_weight_runs(make: Callable[[], Any]) -> None:
    """T5 casts to the dtype of a weight, and mixers of Mamba multiply by theirs."""
    torch.manual_seed(0)
    model = adapted(make(), target_modules=["q", "q_proj"])
    quantized = quantize_base(copy.deepcopy(model))
    assert_close(step(quantized), step(dequantized(model, quantized)))


def test_the_weight_tells_dtype_and_shape_alone() -> None:
    layer: Any = quantize_base(adapted(base(torch.bfloat16))).base_model.model.model.layers[0]
    for each in (layer.self_attn.q_proj, layer.self_attn.q_proj.base_layer):
        weight = each.weight  # PEFT's property of an adapted layer returns the base's
        assert (weight.shape, weight.dtype) == ((64, 32), torch.bfloat16)
        with pytest.raises(RuntimeError, match="weight is held in FP8 by quantize_base"):
            weight.float()
    assert layer.half().self_attn.q_proj.weight.dtype == torch.float16


def test_layers_that_train_are_left() -> None:
    model = adapted(base(), target_modules=["q_proj"], modules_to_save=["o_proj"])
    names = {name.rpartition("self_attn.")[2] for name in held(quantize_base(model))}
    assert "o_proj.modules_to_save.default" not in names
    assert {"q_proj.base_layer", "k_proj", "v_proj"} <= names
    for each in model.parameters():
        each.requires_grad_(False)
    assert any(name.endswith("modules_to_save.default") for name in held(quantize_base(model)))


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "casts": lambda model: model.half().to(torch.bfloat16).float(),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_and_casts_have_the_same_numbers(copied: Callable[[Any], Any]) -> None:
    model = quantize_base(adapted(base()))
    expected = {
        name: layer.held(torch.float32).dequantized() for name, layer in held(model).items()
    }
    for name, layer in held(copied(model)).items():
        assert torch.equal(layer.held(torch.float32).dequantized(), expected[name])


def test_adapters_are_saved_and_resumed(tmp_path: Path) -> None:
    model = apply_patch(quantize_base(adapted(base())), layers=["lora", "gated"])
    truth = step(model)
    model.save_pretrained(tmp_path / "adapters")
    again = PeftModel.from_pretrained(
        quantize_base(base()), tmp_path / "adapters", is_trainable=True
    )
    assert_close(step(apply_patch(again, layers=["lora", "gated"])), truth)
    fresh = quantize_base(adapted(base()))
    for each in fresh.parameters():
        each.data.zero_()
    fresh.load_state_dict(model.state_dict())
    assert_close(step(fresh), truth)


MERGES: dict[str, Callable[[Any], Any]] = {
    "merge_adapter": lambda model: model.merge_adapter(),
    "safe_merge": lambda model: model.merge_adapter(safe_merge=True),
    "merge_and_unload": lambda model: model.merge_and_unload(),
    "DoRA": lambda model: model.add_adapter(
        "dora", LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    ),
}


@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_what_changes_or_reads_the_weight_is_an_error(merge: Callable[[Any], Any]) -> None:
    model = quantize_base(adapted(base()))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="weight is held in FP8 by quantize_base"):
        merge(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_unload_gives_the_layers_back() -> None:
    model = adapted(base())
    quantized = quantize_base(copy.deepcopy(model))
    truth = dequantized(model, quantized).unload()
    ids = torch.arange(5)[None]
    assert len(held(quantized.unload())) == LAYERS
    with torch.no_grad():
        found, expected = (each.eval()(ids).logits for each in (quantized.get_base_model(), truth))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_moved_model_reads_its_new_tensors() -> None:
    """Decisions of the last call are kept: not the tensors of then."""
    model = apply_patch(quantize_base(adapted(base())), layers=["lora", "gated"])
    step(model)
    other = apply_patch(quantize_base(adapted(base())), layers=["lora", "gated"])
    for layer in held(other).values():
        layer.scales = (layer.held(torch.float32).scales * 2).view(torch.int32)
        layer.numbers = nn.Parameter(layer.numbers.flip(1), requires_grad=False)
    for layer, changed in zip(held(model).values(), held(other).values(), strict=True):
        layer.numbers.data = changed.numbers.data
        layer.scales = changed.scales
    assert_close(step(model), step(other))


def test_status_names_what_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply_patch(quantize_base(adapted(base())))
    assert "14 linear in FP8, which rounds weights\n" in str(patch_status(model))
    monkeypatch.setattr(fp8, "has_fp8", lambda _: True)
    assert "weights, and in bf16 activations and gradients, a row at a time" in str(
        patch_status(model)
    )
    assert "FP8" not in str(patch_status(apply_patch(adapted(base()))))


def test_what_cannot_be_held_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"quant_type must be one of \('fp8',\), got 'int8'"):
        quantize_base(base(), "int8")
    with pytest.raises(ValueError, match="and are not yet, got a Qwen3ForCausalLM without"):
        quantize_base(quantize_base(base()))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device must be .*no CUDA GPU is, got 'cuda'"):
            quantize_base(base(), device="cuda")
    with pytest.raises(TypeError, match="Linear"):
        quantize_base(nn.Linear(32, 32))  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_step_on_a_gpu_is_near_that_of_the_dequantized_weights() -> None:
    """Which it reaches weight after weight. What differs is the rounding of activations."""
    if not fp8.has_fp8(torch.device("cuda")):
        pytest.skip("needs a GPU that multiplies e4m3")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
    model = adapted(base(torch.bfloat16, **sizes))
    quantized = quantize_base(copy.deepcopy(model), device="cuda").to("cuda")
    truth_model = dequantized(model.to("cuda"), quantized)
    ids = (torch.arange(512, device="cuda").view(2, 256) * 7) % 96
    found = []
    for each in (apply_patch(quantized), apply_patch(truth_model)):
        with torch.autocast("cuda", torch.bfloat16):
            loss = each(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append({n: p.grad.double() for n, p in each.named_parameters() if p.grad is not None})
    ours, truth = found
    assert ours.keys() == truth.keys()
    assert len(truth) == 2 * LAYERS
    for name, value in truth.items():
        # about 3.7e-2 a product: seven follow each other, and a gradient passes them twice
        assert 1e-3 < (ours[name] - value).norm() / value.norm() < 0.5, name
