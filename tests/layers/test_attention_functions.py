"""Layers on kernels in front of each attention function of Transformers, where windows slide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from training_step import Step, call, gradients, joined, step, widened
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, PreTrainedConfig

from liger_patch import apply_patch, patch_status
from liger_patch.layers.replace import count_layers

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 131,
    "sliding_window": 48,
    "pad_token_id": 0,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    # the first has norms of queries and keys
    "gemma3_text": Gemma3TextConfig(
        **SIZES, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=32
    ),
    "mistral": MistralConfig(**SIZES),
}
TOKENS = 160  # more than a block of flex attention's, more than a window
pytestmark = [
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable. is deprecated"),
    # of Dynamo, where queries that are not leaves come to flex attention
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


def make_model(model_type: str, attention: str) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[model_type]
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def make_batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    input_ids = torch.randint(3, SIZES["vocab_size"], (2, TOKENS))
    return {"input_ids": input_ids, "labels": input_ids.masked_fill(input_ids % 3 == 0, -100)}


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_step_is_no_worse_than_the_models_own(
    model_type: str, attention: str, checkpointing: bool
) -> None:
    model, batch = make_model(model_type, attention).cuda(), make_batch()
    batch = {name: value.cuda() for name, value in batch.items()}
    wide = widened(model)
    wide.set_attn_implementation("eager")
    truth = step(wide, batch)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def in_autocast() -> Step:
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(model, batch, use_cache=False).loss
        return {"loss": loss.detach(), **gradients(model, loss)}

    eager = in_autocast()
    ours_model = apply_patch(model, layers=True)
    ours = in_autocast()
    assert patch_status(ours_model).fused
    assert count_layers(ours_model)["rotary"] == SIZES["num_hidden_layers"]
    truth, eager, ours = joined(truth, eager, ours)
    assert_no_worse(ours, eager, truth, torch.bfloat16)


@pytest.mark.slow  # flex attention is compiled
@torch.no_grad()  # it has no backward pass on a CPU
@pytest.mark.parametrize("model_type", CONFIGS)
def test_an_evaluation_with_flex_attention_has_the_models_own_loss(model_type: str) -> None:
    model, batch = make_model(model_type, "flex_attention").eval(), make_batch()
    eager = call(model, batch, use_cache=False).loss
    apply_patch(model, layers=True)
    ours = call(model, batch, use_cache=False).loss
    assert patch_status(model).fused
    torch.testing.assert_close(ours, eager)
