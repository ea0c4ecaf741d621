"""The model that the engines train, for distributed_step: plain, with adapters, or in 4 bits."""

from __future__ import annotations

import argparse
import tempfile
from functools import cache
from typing import Any

import torch
from tiny_models import LLAMA, tiny_model
from torch import distributed as dist
from torch import nn
from transformers import BitsAndBytesConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# of other sizes bitsandbytes 0.50 takes the scales of other blocks, on CPUs with AVX-512
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
TWO_LOSSES = "two_losses"


class TwoLosses(LlamaForCausalLM):
    """Calls its head twice, for a loss each: of a class without a row."""

    def forward(self, input_ids: Any, labels: Any, **kwargs: Any) -> Any:  # pyright: ignore
        states = self.model(input_ids, **kwargs).last_hidden_state
        logits, others = self.lm_head(states), self.lm_head(states.tanh())
        losses = [
            nn.functional.cross_entropy(each[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            for each in (logits, others)
        ]
        return CausalLMOutputWithPast(loss=losses[0] + 0.5 * losses[1], logits=logits)


def make_model(device: torch.device, arguments: argparse.Namespace) -> Any:
    """A tiny model, the same at each call; ``arguments`` of distributed_step."""
    if arguments.quantized:
        return with_adapters(_in_4_bits(device))
    has_two_losses = arguments.model == TWO_LOSSES
    model: Any = tiny_model("llama" if has_two_losses else arguments.model)
    if has_two_losses:
        model.__class__ = TwoLosses
    model.config.tie_word_embeddings = arguments.tied
    if arguments.tied:
        model.tie_weights()
    else:
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
    return (with_adapters(model) if arguments.lora else model).to(device)


def with_adapters(model: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    # random adapters of full strength would make the steps chaotic, and roundings large
    config = LoraConfig(
        r=4, lora_alpha=1, target_modules=[*LAYERS, "lm_head"], init_lora_weights=False
    )
    return get_peft_model(model, config)  # pyright: ignore[reportArgumentType]


def _in_4_bits(device: torch.device) -> Any:
    """As QLoRA loads it, with numbers of 4 bits in tensors that engines can shard."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=torch.float32,
    )
    model: Any = LlamaForCausalLM.from_pretrained(
        _checkpoint(), quantization_config=config, dtype=torch.float32, device_map={"": device}
    )
    return model.train()


@cache
def _checkpoint() -> str:
    config = tiny_model(LLAMA).config
    config.update(SIZES)
    torch.manual_seed(0)
    return saved(LlamaForCausalLM(config))


def saved(model: Any) -> str:
    """The folder of a checkpoint for all ranks."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    return folder[0]
