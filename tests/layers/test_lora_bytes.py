"""The bytes that layers with LoRA adapters keep for the backward pass, as docs/lora.md has them."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from liger_patch import apply_patch

DOCS = (Path(__file__).parents[2] / "docs" / "lora.md").read_text(encoding="utf-8")
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 64}
LLAMA_1B = LlamaConfig(hidden_size=2048, intermediate_size=8192, head_dim=64, **HEADS)
QWEN_8B = Qwen3Config(hidden_size=4096, intermediate_size=12288, head_dim=128, **HEADS)


def kept_bytes(config: PretrainedConfig, layers: int, tokens: int) -> int:
    """Return what autograd saves in a step of so many layers, without weights."""
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
    apply_patch(model.train())
    ids = torch.arange(tokens)[None] % config.vocab_size
    weights = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.requires_grad
    found = (each.untyped_storage().nbytes() for at, each in kept.items() if at not in weights)
    return sum(found)


@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__.startswith("2.6."),
    reason="its attention of grouped heads on a CPU keeps the scores",
)
@pytest.mark.parametrize(
    ("config", "said"),
    [(LLAMA_1B, "Llama-3.2-1B keeps 59.7 kB"), (QWEN_8B, "Qwen3-8B 113.0 kB")],
    ids=["llama", "qwen3"],
)
def test_bytes_of_a_token_and_layer(config: PretrainedConfig, said: str) -> None:
    """What a second layer and 64 more tokens add: without the head, and without cast adapters."""
    sizes = {(n, t): kept_bytes(config, n, t) for n in (1, 2) for t in (64, 128)}
    more = [sizes[n, 128] - sizes[n, 64] for n in (1, 2)]
    kilobytes = (more[1] - more[0]) / 64 / 1000
    assert said.endswith(f" {kilobytes:.1f} kB")
    assert said in " ".join(DOCS.split())
