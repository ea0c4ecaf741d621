"""Build a model on the meta device from its config, and read the sizes of what a step holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.pytorch_utils import Conv1D

from liger_patch.registry import available

BITS_4 = 0.5 + 4 / 64  # bytes a weight in nf4, with a float32 scale for 64 of them
DOUBLE_QUANTIZED = 0.5 + 1 / 64 + 4 / (64 * 256)  # scales in 8 bits, for 256 of them in float32
OPTIMIZERS = {  # bytes a trained weight, of those in float32 and of those in 16 bits
    "none": (0.0, 0.0),
    "adamw": (8.0, 4.0),  # torch's: both states have the dtype of the weight
    "adamw-float32": (8.0, 8.0),
    "adamw-8bit": (2 + 8 / 256, 2 + 8 / 256),  # bitsandbytes': a scale for 256 numbers
}

OTHER_INPUTS = {"audio_config": "sound", "protein_encoder_config": "proteins"}  # by part of configs


@dataclass(frozen=True)
class TrainingStep:
    """The training step to estimate: what is trained on one device, and how.

    Attributes:
        batch, length: sequences, and tokens of each.
        dtype: of the weights.
        autocast: the dtype of products (``Trainer(bf16=True)``), None for no autocast.
        lora_rank: of adapters on all linear layers but the head; None trains every weight.
        adapter_dtype: of these adapters.
        bits: 16 or 32 as ``dtype`` says, or 4 for linear layers in nf4.
        double_quant: whether the scales of 4-bit weights are quantized too.
        checkpointing: whether layers are computed again in the backward pass.
        checkpoint_offload: whether their inputs wait in host memory, where liger_patch runs them.
        checkpoint_every: of how many layers it keeps one input.
        host_gib: GiB of host memory that these may take; None for all that they need.
        optimizer: a name of OPTIMIZERS.
        chunk_mib: MiB of logits that liger_patch holds; None for its default.
        supervised: share of the labels that are not ignored.
        attention: "sdpa" or "eager"; None for what Transformers chooses.
    """

    batch: int = 1
    length: int = 2048
    dtype: torch.dtype = torch.bfloat16
    autocast: torch.dtype | None = torch.bfloat16
    lora_rank: int | None = None
    adapter_dtype: torch.dtype = torch.float32
    bits: int | None = None
    double_quant: bool = False
    checkpointing: bool = False
    checkpoint_offload: bool = False
    checkpoint_every: int = 1
    host_gib: float | None = None
    optimizer: str = "adamw"
    chunk_mib: float | None = None
    supervised: float = 1.0
    attention: str | None = None

    def in_words(self) -> list[str]:
        """Return how the step trains."""
        words = [dtype_name(self.dtype)]
        words += [f"autocast to {dtype_name(self.autocast)}"] if self.autocast else []
        if self.lora_rank:
            words.append(f"LoRA of rank {self.lora_rank}")
        words += [f"{self.bits} bits"] if self.bits else []
        words += ["checkpointing"] if self.checkpointing else []
        if self.checkpoint_offload:
            bound = "" if self.host_gib is None else f" to {self.host_gib:g} GiB of the host"
            words.append(f"offloaded by liger_patch{bound}")
            every = self.checkpoint_every
            words += [f"one of {every} layer inputs kept"] if every > 1 else []
        return [*words, f"optimizer {self.optimizer}"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Sizes:
    """Bytes that exist beside what a step allocates, and the layers that are in 4 bits."""

    parameters: int
    weights: int
    trained: int
    optimizer: int
    quantized: Sequence[nn.Linear]


def load_config(model: str) -> Any:
    """Return the config of a folder, a config file, or a name in the local cache.

    Raises:
        ValueError: there is none, or it is of no model that generates text.
    """
    place = os.path.expanduser(model)
    if os.path.isdir(place) and not os.path.isfile(os.path.join(place, "config.json")):
        raise ValueError(_no_config(model, "this folder has no config.json"))
    try:
        config = AutoConfig.from_pretrained(place, local_files_only=True)
    except Exception as error:  # also Transformers' own, of fields that a config cannot have
        reason = described(error)
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            reason = f"it is not in the cache; `hf download {model} config.json` puts it there"
        raise ValueError(_no_config(model, reason)) from error
    _model_class(config)
    return config


def _no_config(model: str, reason: str) -> str:
    return (
        "model must be a name in the local Hugging Face cache, a folder or a config.json, got "
        f"{model!r}: {reason}"
    )


def described(error: Exception) -> str:
    """Return the kind of an error and its first line; all lines where that ends in a colon."""
    first, *others = [each.strip() for each in str(error).strip().splitlines()] or [""]
    text = " ".join([first, *others]) if first.endswith(":") else first
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def model_class_name(config: Any) -> str:
    """Return the class that is built: a config may name another, as a classifier's does."""
    model_class: Any = _model_class(config)
    if hasattr(model_class, "_model_mapping"):
        model_class = model_class._model_mapping[type(config)]
    return model_class.__name__


def _model_class(config: Any) -> Any:
    """Return Transformers' automatic class for a config, or the class of its row."""
    is_seq2seq = getattr(config, "is_encoder_decoder", False)
    for auto in () if is_seq2seq else (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    rows = [row for row in available() if row.model_type == config.model_type]
    reason = _why_not_estimated(config) if rows or is_seq2seq else None
    if rows and reason is None:
        return getattr(transformers, rows[0].class_name)
    raise ValueError(
        "model must be a decoder that generates text (of AutoModelForCausalLM or "
        f"AutoModelForImageTextToText), got model_type {config.model_type!r}"
        + (f", not estimated: {reason}" if reason else "")
    )


def _why_not_estimated(config: Any) -> str | None:
    """Return why a step of text alone is no step of a model with a row; None where it is one."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    for part, inputs in OTHER_INPUTS.items():
        if part in config.sub_configs:
            return f"its inputs are {inputs} and text"
    return None


def build(config: Any, step: TrainingStep) -> tuple[Any, Sizes]:
    """Return a model in training mode on the meta device, with its adapters, and its sizes."""
    with torch.device("meta"):
        model_class = _model_class(config)
        is_auto = hasattr(model_class, "from_config")
        make = model_class.from_config if is_auto else model_class._from_config
        model = make(config, dtype=step.dtype, attn_implementation=step.attention)
        model.tie_weights()  # Transformers 5.0 has not yet
        if step.bits == 4:
            _make_linear(model)
        head = model.get_output_embeddings()
        linear = [each for each in model.modules() if type(each) is nn.Linear and each is not head]
        if step.lora_rank is not None:
            model = _with_adapters(model, step)
    quantized = linear if step.bits == 4 else []
    return model.train(), _sizes(model, step, quantized)


def without_adapters(config: Any, step: TrainingStep) -> Any:
    """Return such a model without adapters, for its shapes: adapters take most of the time."""
    model, _ = build(config, replace(step, lora_rank=None))
    return model


def _make_linear(model: nn.Module) -> None:
    """Replace the transposed linear layers of GPT-2, as bitsandbytes' quantizer does."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            linear = nn.Linear(inputs, outputs, dtype=module.weight.dtype)
            model.set_submodule(name, linear)


def _with_adapters(model: Any, step: TrainingStep) -> Any:
    from peft import LoraConfig, get_peft_model

    assert step.lora_rank is not None
    lora = LoraConfig(r=step.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    for each in model.parameters():
        if each.requires_grad:
            each.data = each.data.to(step.adapter_dtype)
    return model


def _sizes(model: Any, step: TrainingStep, quantized: Sequence[nn.Linear]) -> Sizes:
    in_4_bits = {id(each.weight) for each in quantized}
    bytes_in_4_bits = DOUBLE_QUANTIZED if step.double_quant else BITS_4
    wide, narrow = OPTIMIZERS[step.optimizer]
    weights = trained = states = 0.0
    parameters = list(model.parameters())
    for each in parameters:
        size = each.numel()
        weights += size * (bytes_in_4_bits if id(each) in in_4_bits else each.dtype.itemsize)
        if each.requires_grad:
            trained += size
            states += size * (wide if each.dtype == torch.float32 else narrow)
    weights += sum(each.numel() * each.dtype.itemsize for each in model.buffers())
    count = sum(each.numel() for each in parameters)
    return Sizes(count, round(weights), round(trained), round(states), quantized)
