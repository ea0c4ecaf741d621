"""Define the models whose training steps are measured: real sizes, random weights, bf16.

Options that cost no time have their defaults: the bases of rotary embeddings, special tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from .heads import IGNORE_INDEX

IGNORED = 0.4  # of the labels
PACKED = 100, 900  # tokens of a sequence in packed rows: the least, and one more than the most
LEAST_FILLED = 0.25  # of a padded row


def has_sliding_attention(config: Any) -> bool:
    """Return whether some layers attend within a window, as those of Gemma 2 and 3 do."""
    return "sliding_attention" in (getattr(config, "layer_types", None) or ())


@dataclass(frozen=True)
class Model:
    """A model, its batch, and how it is trained.

    Attributes:
        name: of the model, and what is special.
        config: of the text model.
        sequences, length: shape of a batch.
        lora_rank: of adapters on all linear layers but the head, None for training every weight.
        quantized: whether bitsandbytes holds these layers in 4 bits (nf4).
        rows: "whole" for one sequence a row, "packed" for several, "padded" for a shorter one.
    """

    name: str
    config: PreTrainedConfig
    sequences: int
    length: int = 2048
    lora_rank: int | None = None
    quantized: bool = False
    rows: str = "whole"

    def resized(self, sequences: int, length: int) -> Model:
        """Return the model with another batch, which ends its name."""
        name = f"{self.name.partition(', ')[0]}, {sequences} x {length}"
        return replace(self, name=name, sequences=sequences, length=length)

    def build(self, device: torch.device | str = "cuda") -> Any:
        """Return the model in training mode, with random weights made on the device."""
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
            if self.quantized:
                quantise(model)
            if self.lora_rank is not None:
                from peft import LoraConfig, get_peft_model

                lora = LoraConfig(
                    r=self.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM"
                )
                model = get_peft_model(model, lora, autocast_adapter_dtype=False)
        return model.train()

    def batch(self, device: torch.device | str = "cuda") -> dict[str, Tensor]:
        """Return random tokens, which are their own labels where they are not ignored."""
        generator = torch.Generator(device).manual_seed(0)
        shape = (self.sequences, self.length)
        input_ids = torch.randint(self.config.vocab_size, shape, device=device, generator=generator)
        ignored = torch.rand(shape, device=device, generator=generator) < IGNORED
        of_rows: dict[str, Tensor] = {}
        if self.rows == "packed":
            places = of_rows["position_ids"] = _packed_places(shape).to(device)
            ignored |= places == 0  # no token predicts the first of the next sequence
        if self.rows == "padded":
            filled = torch.linspace(LEAST_FILLED, 1, self.sequences, device=device) * self.length
            kept = torch.arange(self.length, device=device) < filled[:, None]
            of_rows["attention_mask"] = kept.long()
            ignored |= ~kept
        labels = input_ids.masked_fill(ignored, IGNORE_INDEX)
        return {"input_ids": input_ids, "labels": labels, **of_rows}


def _packed_places(shape: tuple[int, int]) -> Tensor:
    """Return (B, T) position ids of rows that hold sequences of random lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(shape[0]):
        places: list[int] = []
        while len(places) < shape[1]:
            places += range(int(torch.randint(*PACKED, (1,), generator=generator)))
        rows.append(places[: shape[1]])
    return torch.tensor(rows)


def quantise(model: Any) -> None:
    """Hold every linear layer but the head in 4 bits, as Transformers does with a loaded model."""
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    parameters: Any = Params4bit  # whose constructor its metaclass hides
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is not torch.nn.Linear or layer is model.get_output_embeddings():
                continue
            quantized = Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                compute_dtype=torch.bfloat16,
                device="meta",
            )
            quantized.bias = layer.bias
            weight = layer.weight.detach()
            quantized.weight = parameters(
                weight.cpu(), requires_grad=False, quant_type="nf4", module=quantized
            ).to(weight.device)
            setattr(parent, name, quantized)
    model.is_loaded_in_4bit = True


FULL_WIDTH = (
    Model(
        "Llama-3.2-1B, 8 x 2048",
        LlamaConfig(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=131072,
            tie_word_embeddings=True,
        ),
        sequences=8,
    ),
    Model(
        "Qwen3-0.6B, 8 x 2048",
        Qwen3Config(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
            tie_word_embeddings=True,
        ),
        sequences=8,
    ),
    Model(
        "Gemma-2-2B, 4 x 2048",
        Gemma2Config(
            hidden_size=2304,
            intermediate_size=9216,
            num_hidden_layers=26,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            vocab_size=256000,
        ),
        sequences=4,
    ),
    Model(
        "Gemma-3-270M, 8 x 2048",
        Gemma3TextConfig(
            hidden_size=640,
            intermediate_size=2048,
            num_hidden_layers=18,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
            vocab_size=262144,
            sliding_window=512,
        ),
        sequences=8,
    ),
    Model(
        "Qwen3-8B + LoRA, 4 x 2048",
        Qwen3Config(
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
        ),
        sequences=4,
        lora_rank=16,
    ),
)
OTHER_ROWS = tuple(
    replace(model, name=f"{model.name}, {rows}", rows=rows)
    for model in FULL_WIDTH[:2]
    for rows in ("packed", "padded")
)
MODELS = (*FULL_WIDTH, *OTHER_ROWS)
