"""Build a mixture of random experts in 4 bits, layer by layer: in 16 bits, a model of 30B would fit
neither the GPU nor, in the time of a run, a disk.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from liger_patch import quantize_experts

from .models import quantise

SPREAD = 0.02  # standard deviation of weights, as models are initialized


def held_model(config: Any, lora: dict[str, Any], quant_type: str, device: str) -> Any:
    """Return PEFT's model: experts in MXFP4, or in nf4 as linear layers are then; adapters in
    float32.
    """
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for module in model.modules():
        if not _has_experts(module):
            _fill(module, device, generator)
    if quant_type == "nf4":
        quantise(model)
    for name, module in list(model.named_modules()):
        if any(each.is_meta for each in module._buffers.values() if each is not None):
            model.set_submodule(name, type(module)(config=model.config).to(device))
    model = get_peft_model(model, LoraConfig(**lora, task_type="CAUSAL_LM"))
    for layer in model.get_base_model().get_decoder().layers:
        for module in layer.modules():
            _fill(module, device, generator)
        quantize_experts(layer, device, quant_type=quant_type)
    return model


def _has_experts(module: nn.Module) -> bool:
    return any(each.dim() == 3 for each in module._parameters.values() if each is not None)


def _fill(module: nn.Module, device: str, generator: torch.Generator) -> None:
    """Give a module's own parameters of the meta device random values; norms get ones."""
    for name, parameter in module._parameters.items():
        if parameter is None or not parameter.is_meta:
            continue
        value: Tensor = torch.empty_like(parameter, device=device)
        if value.dim() > 1:
            value.normal_(0.0, SPREAD, generator=generator)
        else:
            value.fill_(0.0 if "bias" in name or "sinks" in name else 1.0)
        module._parameters[name] = nn.Parameter(value, parameter.requires_grad)
