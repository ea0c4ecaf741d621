"""Build a model on the meta device from its config, and read the sizes of what a step holds."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from liger_patch.layers import experts
from liger_patch.layers.quantized_base import quantize_base
from liger_patch.layers.quantized_experts import hold_experts

BITS_4 = 0.5 + 4 / 64  # bytes a weight in nf4, with a float32 scale for 64 of them
DOUBLE_QUANTIZED = 0.5 + 1 / 64 + 4 / (64 * 256)  # scales in 8 bits, for 256 of them in float32
MXFP4 = 0.5 + 1 / 32  # with a scale in 8 bits for 32 of them
EXPERTS_IN_4_BITS = {"nf4": DOUBLE_QUANTIZED, "mxfp4": MXFP4}  # by quant_type of quantize_experts
OPTIMIZERS = {  # bytes a trained weight, of those in float32 and of those in 16 bits
    "none": (0.0, 0.0),
    "adamw": (8.0, 4.0),  # torch's: both states have the dtype of the weight
    "adamw-float32": (8.0, 8.0),
    "adamw-8bit": (2 + 8 / 256, 2 + 8 / 256),  # bitsandbytes': a scale for 256 numbers
}


@dataclass(frozen=True)
class TrainingStep:
    """The training step to estimate: what is trained on one device, and how.

    Attributes:
        batch, length: sequences, and tokens of each.
        autocast: the dtype of products (``Trainer(bf16=True)``), None for no autocast.
        lora_rank: of adapters on all linear layers but the head and on all experts; None trains
            every weight.
        adapter_dtype: of these adapters.
        bits: what bitsandbytes holds linear layers in: 4 (nf4) or 8; None for ``dtype``.
        double_quant: whether the scales of 4-bit weights are quantized too.
        fp8_base: whether ``quantize_base`` holds linear layers in FP8.
        expert_bytes: a number of experts that ``quantize_experts`` holds in 4 bits, which puts them
            on kernels in all contenders; None for experts in ``dtype``.
        checkpoint_offload: whether the inputs of checkpointed layers wait in host memory, where
            liger_patch runs them.
        optimizer: a name of OPTIMIZERS.
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
    fp8_base: bool = False
    expert_bytes: float | None = None
    checkpointing: bool = False
    checkpoint_offload: bool = False
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
        words += ["base in FP8"] if self.fp8_base else []
        words += ["experts in 4 bits"] if self.expert_bytes else []
        words += ["checkpointing"] if self.checkpointing else []
        words += ["offloaded by liger_patch"] if self.checkpoint_offload else []
        return [*words, f"optimizer {self.optimizer}"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters and of trained ones, and bytes of weights and optimizer states."""

    parameters: int
    weights: int
    trained: int
    optimizer: int


class QuantizedLinear(nn.Linear):
    """A linear layer that bitsandbytes holds in 4 or 8 bits; here its weight has 16 or 32."""


class UnpackedExperts(nn.Module):
    """A ``DequantizedExperts`` without values.

    Args:
        weight: (E, in, out).
        rate: bytes that hold a number.
    """

    def __init__(self, weight: Tensor, rate: float) -> None:
        super().__init__()
        self.shape, self.device = weight.shape, weight.device
        packed = weight.new_empty(round(weight.numel() * rate), dtype=torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        count, source, features = self.shape
        return self.packed.new_empty(count, features, source, dtype=dtype).transpose(1, 2)


def load_config(model: str) -> Any:
    """Return the config of a folder, a config file, or a name in the local cache.

    Raises:
        ValueError: there is none, or it is of no model that generates text.
    """
    place = os.path.expanduser(model)
    if os.path.isdir(place) and not os.path.isfile(os.path.join(place, "config.json")):
        raise ValueError(_no_config(model, "this folder has no config.json"))
    if place.startswith((os.curdir, os.sep)) and not os.path.exists(place):
        raise ValueError(_no_config(model, "there is no such folder or file"))
    try:
        config = AutoConfig.from_pretrained(place, local_files_only=True)
    except Exception as error:  # also Transformers' own, of fields that a config cannot have
        reason = described(error)
        if isinstance(error.__cause__, LocalEntryNotFoundError):
            reason = f"it is not in the cache; `hf download {model} config.json` puts it there"
        raise ValueError(_no_config(model, reason)) from error
    _model_class(config)
    return config


def of_checkpoint(config: Any, step: TrainingStep) -> TrainingStep:
    """Return the step with the bits in which a quantized checkpoint's weights are held.

    Raises:
        ValueError: another library than bitsandbytes holds them, or no adapters train.
    """
    given = _quantization(config)
    if not given or given.get("quant_method") == "mxfp4":  # it trains dequantized
        return step
    bits = 4 if given.get("load_in_4bit") else 8 if given.get("load_in_8bit") else None
    if bits is None:
        raise ValueError(
            "model must be one that is not quantized, or by bitsandbytes, got "
            f"{given.get('quant_method')!r}: without quantization_config in its config.json, it is "
            f"estimated in {dtype_name(step.dtype)}"
        )
    if step.lora_rank is None:
        raise ValueError(
            f"model is held in {bits} bits, which do not train: expected --lora-rank too"
        )
    double_quant = bits == 4 and bool(given.get("bnb_4bit_use_double_quant"))
    return replace(step, bits=bits, double_quant=double_quant)


def _quantization(config: Any) -> dict[str, Any]:
    given = getattr(config, "quantization_config", None) or {}
    return given if isinstance(given, dict) else given.to_dict()


def _no_config(model: str, reason: str) -> str:
    return (
        "model must be a name in the local Hugging Face cache, a folder or a config.json, got "
        f"{model!r}: {reason}"
    )


def described(error: Exception) -> str:
    """Return the kind of an error and what it says, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def model_class_name(config: Any) -> str:
    """Return the class that is built: a config may name another, as a classifier's does."""
    return _model_class(config)._model_mapping[type(config)].__name__


def _model_class(config: Any) -> Any:
    """Return Transformers' automatic class for a config."""
    is_seq2seq = getattr(config, "is_encoder_decoder", False)
    if not is_seq2seq:
        for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
            if type(config) in auto._model_mapping:
                return auto
    raise ValueError(
        "model must be a decoder that generates text (of AutoModelForCausalLM or "
        f"AutoModelForImageTextToText), got model_type {config.model_type!r}"
        + (", an encoder-decoder" if is_seq2seq else "")
    )


def build(config: Any, step: TrainingStep) -> tuple[Any, Sizes]:
    """Return a model in training mode on the meta device, with its adapters, and its sizes."""
    with torch.device("meta"):
        make = _model_class(config).from_config
        model = make(config, dtype=step.dtype, attn_implementation=step.attention)
        model.tie_weights()  # Transformers 5.0 has not yet
        if step.bits:
            _quantize(model, _quantization(config).get("llm_int8_skip_modules") or [])
        if step.lora_rank is not None:
            model = _with_adapters(model, step)
        if step.fp8_base:
            quantize_base(model)
    rate = step.expert_bytes
    if rate is not None:
        hold_experts(model, lambda weight: UnpackedExperts(weight, rate))
    return model.train(), _sizes(model, step)


def without_adapters(config: Any, step: TrainingStep) -> Any:
    """Return such a model without adapters, for its shapes: adapters take most of the time."""
    model, _ = build(config, replace(step, lora_rank=None, expert_bytes=None))
    return model


def _quantize(model: Any, skipped: list[str]) -> None:
    """Mark the linear layers, also the transposed ones of GPT-2, that Transformers gives to
    bitsandbytes.
    """
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if module is head or not should_convert_module(name, skipped):
            continue
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            module = nn.Linear(inputs, outputs, dtype=module.weight.dtype)
            model.set_submodule(name, module)
        if type(module) is nn.Linear:
            module.__class__ = QuantizedLinear


def _with_adapters(model: Any, step: TrainingStep) -> Any:
    from peft import LoraConfig, get_peft_model

    assert step.lora_rank is not None
    head, linear = model.get_output_embeddings(), (nn.Linear, Conv1D)
    named = list(model.named_modules())
    of_experts = [
        f"{name}.{each}"
        for name, module in named
        for each in (experts.FIRST, experts.LAST)
        if getattr(module._parameters.get(each), "ndim", 0) == 3
    ]
    lora = LoraConfig(
        r=step.lora_rank,
        # by name: of "all-linear", PEFT 0.21 doubles the rank on some models' experts
        target_modules=[n for n, each in named if isinstance(each, linear) and each is not head],
        target_parameters=of_experts or None,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    for each in model.parameters():
        if each.requires_grad:
            each.data = each.data.to(step.adapter_dtype)
    return model


def _sizes(model: Any, step: TrainingStep) -> Sizes:
    quantized = {id(each.weight) for each in model.modules() if isinstance(each, QuantizedLinear)}
    in_4_bits = DOUBLE_QUANTIZED if step.double_quant else BITS_4
    wide, narrow = OPTIMIZERS[step.optimizer]
    weights = trained = states = 0.0
    parameters = list(model.parameters())
    for each in parameters:
        size = each.numel()
        if id(each) not in quantized:
            weights += size * each.dtype.itemsize
        elif step.bits == 4:
            weights += size * in_4_bits
        else:  # with a float32 scale for each row
            weights += size + 4 * len(each)
        if each.requires_grad:
            trained += size
            states += size * (wide if each.dtype == torch.float32 else narrow)
    weights += sum(each.numel() * each.dtype.itemsize for each in model.buffers())
    count = sum(each.numel() for each in parameters)
    for each in model.modules():
        if isinstance(each, UnpackedExperts):
            count += each.shape.numel() - each.packed.numel()
    return Sizes(count, round(weights), round(trained), round(states))
