"""Where the memory of a step goes, of tiny models whose parts can be counted by hand."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from estimated_models import (
    HIDDEN,
    LAYERS,
    PEFTS_WARNINGS,
    SIZE,
    STEP,
    TINY,
    TOKENS,
    VOCABULARY,
)
from torch import nn
from transformers import BertConfig, GPT2Config, GptOssConfig, LlamaConfig, Qwen3MoeConfig

from liger_patch import quantize_base, quantize_experts
from liger_patch.estimate import estimate as estimates
from liger_patch.estimate.model import (
    EXPERTS_IN_4_BITS,
    QuantizedLinear,
    TrainingStep,
    build,
    of_checkpoint,
)
from liger_patch.estimate.step import EAGER, OURS, OURS_HEAD, trace_step
from liger_patch.estimate.trace import MemoryTrace
from liger_patch.kernels import gated_mlp
from liger_patch.layers import mlp

EXPERTS = 5  # no other tensor has the size of their weights


@pytest.fixture
def config() -> LlamaConfig:
    return LlamaConfig(**TINY)


def parts(config: Any, step: TrainingStep, contender: Any) -> dict[str, int]:
    trace, sizes = trace_step(config, step, contender)
    return estimates.parts_at_peak(trace, sizes, step)


def held_bytes(model: Any) -> int:
    """Of its weights and buffers, and of the scales that bitsandbytes hangs on them."""
    held = 0
    for each in [*model.parameters(), *model.buffers()]:
        state, scales = getattr(each, "quant_state", None), [getattr(each, "SCB", None)]
        if state is not None:
            scales = [state.absmax, state.state2.absmax if state.nested else None]
        held += sum(t.nbytes for t in (each, *scales) if t is not None)
    return held


def test_a_trace_counts_what_lives() -> None:
    weight = torch.empty(256, 256, device="meta", requires_grad=True)  # not counted
    memory = MemoryTrace([weight])
    with memory:
        x = torch.empty(1024, 256, device="meta")  # 1 MiB
        y = x @ weight  # another
        memory.start_backward()
        y.sum().backward()  # y's gradient is a view of one number; the weight's takes 256 KiB
        del y
        trace = memory.finish([weight.grad])
    mib = 2**20
    assert trace.peak()[0] == pytest.approx(2.25 * mib, abs=2048)
    assert [each.size for each in trace.allocations if each.is_gradient] == [mib // 4]


def test_weights_and_states_are_the_models_own(config: LlamaConfig) -> None:
    model, sizes = build(config, STEP)
    count = sum(each.numel() for each in model.parameters())
    assert sizes.parameters == count
    assert sizes.weights == pytest.approx(2 * count, abs=1024)  # buffers
    assert build(config, replace(STEP, optimizer="adamw"))[1].optimizer == 4 * count
    assert build(config, replace(STEP, optimizer="adamw-float32"))[1].optimizer == 8 * count
    config.tie_word_embeddings = True
    assert build(config, STEP)[1].parameters == count - VOCABULARY * HIDDEN


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_4_bits_leave_the_head_and_the_embeddings() -> None:
    """And hold layers that are transposed: c_attn 3, c_proj 1, feed-forward 4 and 4."""
    config = GPT2Config(n_embd=HIDDEN, n_layer=LAYERS, n_head=4)
    model, sizes = build(config, replace(STEP, lora_rank=4, bits=4))
    quantized = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    linear = sum(each.weight.numel() for each in quantized)
    assert linear == LAYERS * 12 * HIDDEN * HIDDEN
    others = [each for n, each in model.named_parameters() if not n.endswith("base_layer.weight")]
    buffers = model.buffers()  # with Transformers 5.0, masks
    rest = sum(each.numel() * each.dtype.itemsize for each in (*others, *buffers))
    assert sizes.weights == pytest.approx(0.5625 * linear + rest, abs=1024)


@pytest.mark.parametrize(
    "options",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {
            "load_in_4bit": True,
            "bnb_4bit_use_double_quant": True,
            "llm_int8_skip_modules": ["lm_head", "model.layers.0.mlp"],
        },
        {"load_in_8bit": True},
    ],
)
def test_a_quantized_checkpoint_takes_what_its_loaded_model_does(
    options: dict[str, Any], config: LlamaConfig, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    how = transformers.BitsAndBytesConfig(**options)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=how, dtype=torch.bfloat16
    )
    step = of_checkpoint(model.config, replace(STEP, lora_rank=4))
    _, sizes = build(model.config, step)
    assert sizes.weights - 4 * sizes.trained == pytest.approx(held_bytes(model), abs=64)
    eager, ours = (parts(model.config, step, each) for each in (EAGER, OURS))
    assert eager["weights"] == ours["weights"] == sizes.weights
    with pytest.raises(ValueError, match=r"\d bits, which do not train: expected --lora-rank"):
        of_checkpoint(model.config, STEP)


def test_a_table_of_positions_that_ends_before_the_usual_lengths() -> None:
    config = BertConfig(
        is_decoder=True,
        hidden_size=HIDDEN,
        intermediate_size=SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
    )
    step = replace(STEP, length=TOKENS // 4)
    found = estimates.estimate(config, step)
    assert all(each.peak and not each.longest for each in found)
    message = rf"a step of {2 * TOKENS} tokens, as eager runs it, on .* 'bert', with 512 positions"
    with pytest.raises(ValueError, match=message):
        estimates.estimate(config, replace(step, length=2 * TOKENS))


def test_eager_holds_the_logits_in_float32_three_times(config: LlamaConfig) -> None:
    found = parts(config, STEP, EAGER)
    logits = TOKENS * VOCABULARY
    # in the backward pass: the log-softmax and two gradients, in float32
    assert found["logits and loss"] == pytest.approx(logits * 3 * 4, rel=0.01)
    assert "chunk of logits" not in found


def test_ours_holds_a_chunk_of_logits(config: LlamaConfig) -> None:
    step = replace(STEP, chunk_mib=4, length=4096)
    trace, _ = trace_step(config, step, OURS_HEAD)
    sizes = {each.purpose: each.size for each in trace.allocations if each.purpose}
    assert sizes == {
        "chunk of logits": pytest.approx(4 * 2**20, rel=0.3),
        "gradient of the head": 2 * VOCABULARY * HIDDEN,
        "gradient of hidden states": 2 * 4096 * HIDDEN,
    }


def test_layers_keep_what_their_documentation_says(config: LlamaConfig) -> None:
    """docs/design.md: a norm keeps its input, a feed-forward layer 2 H + 4 I bytes a token."""
    steps = [replace(STEP, length=length, chunk_mib=0.05) for length in (TOKENS, 2 * TOKENS)]
    kept = [parts(config, step, OURS)["kept by the layers"] for step in steps]
    a_token = (kept[1] - kept[0]) / TOKENS
    # two residual inputs, two normed ones, attention's result, q (rotated), k and v, statistics
    attention = 2 * (HIDDEN * 6 + HIDDEN) + 4 * 4
    norms = 2 * 4
    assert a_token == pytest.approx(LAYERS * (attention + norms + 4 * SIZE), rel=0.05)


def test_tracing_leaves_no_class_and_no_function_changed(config: LlamaConfig) -> None:
    before = gated_mlp.slices_of, mlp.tokens_of_slice
    trace_step(config, STEP, OURS)
    gc.collect()
    assert (gated_mlp.slices_of, mlp.tokens_of_slice) == before
    assert nn.functional.linear(torch.ones(1, 2), torch.ones(1, 2)).item() == 2.0


def mixture(model_type: str) -> Any:
    if model_type == "gpt_oss":
        return GptOssConfig(**TINY, num_local_experts=EXPERTS, num_experts_per_tok=2, head_dim=16)
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": SIZE}
    return Qwen3MoeConfig(**TINY, **sizes, head_dim=16)


@PEFTS_WARNINGS
@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
def test_all_experts_have_adapters(model_type: str) -> None:
    pytest.importorskip("peft")
    config, step = mixture(model_type), replace(STEP, lora_rank=4)
    found: dict[tuple[int, ...], int] = {}
    for name, each in build(config, step)[0].named_parameters():
        if "mlp.experts" in name and each.requires_grad:
            found[each.shape] = found.get(each.shape, 0) + 1
    sizes = {size for shape in found for size in shape if size not in (HIDDEN, SIZE, 2 * SIZE)}
    assert sizes == {4 * EXPERTS}
    assert sum(found.values()) == 4 * LAYERS


def bf16_model(config: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def assert_takes_what_is_held(model: Any, **quantized: Any) -> int:
    """With adapters on a quantized model; return the bytes of weights that it saves."""
    step = replace(STEP, lora_rank=4)
    plain, sizes = (build(model.config, s)[1] for s in (step, replace(step, **quantized)))
    assert sizes.weights - 4 * sizes.trained == pytest.approx(held_bytes(model), abs=256)
    assert (sizes.parameters, sizes.trained) == (plain.parameters, plain.trained)
    return plain.weights - sizes.weights


@PEFTS_WARNINGS
@pytest.mark.parametrize("quant_type", ["nf4", "mxfp4"])
@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe"])
@pytest.mark.filterwarnings("ignore:quantize_experts. the experts of .* take no adapters")
def test_experts_in_4_bits_take_what_a_models_do(model_type: str, quant_type: str) -> None:
    if quant_type == "nf4":
        pytest.importorskip("bitsandbytes")
    model = bf16_model(mixture(model_type))
    quantize_experts(model, "cpu", quant_type=quant_type)
    assert_takes_what_is_held(model, expert_bytes=EXPERTS_IN_4_BITS[quant_type])


@PEFTS_WARNINGS
def test_a_base_in_fp8_takes_what_a_models_does() -> None:
    pytest.importorskip("peft")
    model = bf16_model(config := transformers.Qwen3Config(**TINY, head_dim=16))
    quantize_base(model)
    saved = assert_takes_what_is_held(model, fp8_base=True)
    steps = [replace(STEP, lora_rank=4, fp8_base=is_fp8) for is_fp8 in (True, False)]
    narrow, wide = (sum(parts(config, each, OURS).values()) for each in steps)
    assert narrow <= wide - saved + 2 * HIDDEN * SIZE  # of one weight, dequantized where it is used


def test_gpt_oss_is_estimated_dequantized() -> None:
    config = mixture("gpt_oss")
    config.quantization_config = {"quant_method": "mxfp4"}
    assert of_checkpoint(config, STEP) == STEP
    assert build(config, STEP)[1] == build(mixture("gpt_oss"), STEP)[1]
