"""Tiny models that bitsandbytes holds in 4 bits, with adapters, and what a step of them gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny_models import ROWS, Batch, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from liger_patch.readers import quantized_weights  # noqa: E402

# peft 0.21 calls Transformers' gradient_checkpointing_enable, which 5.23 has renamed.
# PEFT says so where an adapter touches a tied head.
MARKS = [
    pytest.mark.filterwarnings(
        "ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:Model (has|with) .tie_word_embeddings:UserWarning"),
]


class Checkpoint(NamedTuple):
    model: PreTrainedModel
    folder: Path


def save_checkpoint(model_type: str, folder: Path) -> Checkpoint:
    """Save a tiny model in bf16."""
    config = tiny_model(ROWS[model_type]).config
    # of other sizes bitsandbytes 0.50 takes the scales of other blocks, on CPUs with AVX-512
    config.hidden_size, config.intermediate_size = 64, 128
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
    model.save_pretrained(folder)
    return Checkpoint(model, folder)


def load(checkpoint: Checkpoint, compute_dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """In 4 bits, but for the head and what is not a linear layer."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=["lm_head"],
    )
    model = type(checkpoint.model).from_pretrained(
        checkpoint.folder, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    assert isinstance(model.model.layers[0].self_attn.q_proj, bnb.nn.Linear4bit)
    assert type(model.lm_head) is nn.Linear
    return model


def with_lora(model: nn.Module, targets: Sequence[str] = ("q_proj", "v_proj")) -> nn.Module:
    torch.manual_seed(1)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=list(targets), init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


def results(model: nn.Module, batch: Batch, autocast: bool = False) -> dict[str, Any]:
    model.train()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert any(gradient.any() for gradient in gradients.values())
    return {"loss": loss.detach(), **gradients}


def dequantized(model: nn.Module) -> nn.Module:
    """The same model with the quantized weights written out, in float64."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)):
                readable = quantized_weights.quantized_weight(child, torch.bfloat16)
                assert readable is not None
                weight = readable.dequantized()
                plain = nn.Linear(child.in_features, child.out_features, bias=False)
                plain.weight = nn.Parameter(weight, requires_grad=False)
                setattr(module, name, plain)
    return model.double()
