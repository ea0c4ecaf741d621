"""The smallest random-weight model of every registry row, and batches to run it on.

One table of small sizes serves every config class by the names of the fields that it has; what a
class needs beyond that stands in DEVIATIONS, each with its reason.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from tiny_configurations import AUDIO, DEVIATIONS, END_OF_WORDS, FIRST_WORD, IMAGE, PAD, SIZES
from tiny_configurations import BOS as BOS
from tiny_configurations import EOS as EOS
from tiny_configurations import VOCAB_SIZE as VOCAB_SIZE
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, SiglipVisionConfig

from liger_patch.registry import Architecture, available

ROWS = {row.model_type: row for row in available()}
LLAMA = ROWS["llama"]
Batch = dict[str, torch.Tensor]
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")  # fields with a list of layers


def tiny_model(
    row: Architecture | str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """A random-weight model of `row`, or of the row of this name, in training mode.

    The same seed gives the same weights, in any dtype but for rounding.
    """
    row = ROWS[row] if isinstance(row, str) else row
    model_class = getattr(transformers, row.class_name)
    config = model_class.config_class(**_tiny_arguments(model_class.config_class))
    if row.model_type == "gemma3n":
        # Its own tower needs timm and has 300M parameters. The config's type check admits no
        # other tower, nor does from_pretrained: this model cannot be loaded from a checkpoint.
        embedder = {"vocab_offset": IMAGE, "vocab_size": AUDIO - IMAGE, "rms_norm_eps": 1e-6}
        tower = SiglipVisionConfig(**_tiny_arguments(SiglipVisionConfig), **embedder)
        object.__setattr__(config, "vision_config", tower)
    # Experts in plain operations: the grouped matrix product of later Transformers has no float64.
    options = {"experts_implementation": "eager"}
    torch.manual_seed(seed)
    drawn = model_class._from_config(config, dtype=torch.float32, **options)
    for values in drawn.parameters():
        if not values.any():  # gates, projectors and biases that start by doing nothing
            torch.nn.init.normal_(values, std=0.3)
    if dtype == torch.float32:
        return drawn
    model = model_class._from_config(config, dtype=dtype, **options)
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), drawn.parameters(), strict=True):
            parameter.copy_(values)
    return model


def tiny_batch(
    model: PreTrainedModel,
    *,
    batch: int = 2,
    length: int = 9,
    seed: int = 0,
    ignored: float = 0.3,
) -> Batch:
    """Text inputs of shape (batch, length) with labels.

    A share `ignored` of the labels is -100. Where there are two sequences or more, the last one
    ends in padding: about a quarter of it, attention mask 0, labels -100.
    """
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(FIRST_WORD, END_OF_WORDS, (batch, length), generator=generator)
    order = torch.randperm(batch * length, generator=generator)
    labels = input_ids.flatten().index_fill(0, order[: round(ignored * batch * length)], -100)
    labels = labels.view(batch, length)
    attention_mask = torch.ones_like(input_ids)
    if batch > 1:
        end = length - length // 4
        input_ids[-1, end:] = PAD
        attention_mask[-1, end:] = 0
        labels[-1, end:] = -100
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    # Gemma 3 and PaliGemma refuse to train without them.
    for name in {"token_type_ids", "mm_token_type_ids"} & _forward_arguments(model):
        inputs[name] = torch.zeros_like(input_ids)
    return {name: value.to(model.device) for name, value in inputs.items()}


def _tiny_arguments(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """SIZES for every field of `config_class` that is on by default, sub-configs included."""
    default = config_class()
    fields = {
        name
        for name in inspect.signature(config_class.__init__).parameters
        if vars(default).get(config_class.attribute_map.get(name, name)) is not None
    }
    arguments = {name: size for name, size in SIZES.items() if name in fields}
    kinds = {name: list(dict.fromkeys(getattr(default, name))) for name in KINDS if name in fields}
    if kinds:
        number = max(2, *(len(each) for each in kinds.values()))
        arguments |= {name: (each * number)[:number] for name, each in kinds.items()}
        arguments["num_hidden_layers"] = number
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]  # latents serve each
    for name, inner in config_class.sub_configs.items():
        if inner is AutoConfig:
            inner = type(getattr(default, name))
        arguments[name] = {"model_type": inner.model_type, **_tiny_arguments(inner)}
    return {**arguments, **DEVIATIONS.get(config_class.model_type, {})}


def _forward_arguments(model: PreTrainedModel) -> set[str]:
    return set(inspect.signature(model.forward).parameters)
