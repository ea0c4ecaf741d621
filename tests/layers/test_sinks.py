"""Attention with sinks (gpt-oss) runs on flash attention where its mask can be left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from attention_models import SIZES, WARNINGS, make_batch
from training_step import assert_right, step, widened
from transformers import GptOssConfig, GptOssForCausalLM

from liger_patch import apply_patch, patch_status
from liger_patch.layers import masked_attention

pytestmark = WARNINGS


def gpt_oss() -> Any:
    """Return a model with a layer of each kind, and random sinks."""
    torch.manual_seed(0)
    # all experts: a rounded router would choose others
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 4}
    config = GptOssConfig(**sizes, use_cache=False, sliding_window=9, max_position_embeddings=128)
    model: Any = GptOssForCausalLM(config)
    model.set_experts_implementation("eager")
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model.train()


def test_weights_that_are_asked_for_are_eagers() -> None:
    model = gpt_oss()
    ids = torch.arange(8)[None]
    if transformers.__version__.startswith("5.0."):
        pytest.skip("Transformers 5.0 does not look eager attention up in its table")
    own = model(ids, output_attentions=True).attentions
    apply_patch(model, layers=["attention"])
    for ours, each in zip(model(ids, output_attentions=True).attentions, own, strict=True):
        assert torch.equal(ours, each)
    assert "with masks" not in str(patch_status(model))


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["plain", "packed", "padded", "padded left"])
# Transformers makes the masks of gpt-oss without positions: eager's sequences mix as ours do
@pytest.mark.filterwarnings("ignore:liger_patch packed sequences see one another")
def test_a_step_on_a_gpu_is_no_worse(
    kind: str, checkpointing: bool, record: Callable[..., list[Any]]
) -> None:
    model, batch = gpt_oss(), make_batch(kind)
    truth = step(widened(model), batch)
    model, batch = model.cuda(), {name: value.cuda() for name, value in batch.items()}
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    eager = step(model, batch, autocast=True)
    calls = record(masked_attention, "sink_attention")
    apply_patch(model, layers=["attention"])
    ours = step(model, batch, autocast=True)
    assert len(calls) == 2 * (1 + checkpointing)
    assert_right(ours, eager, truth, torch.bfloat16)
