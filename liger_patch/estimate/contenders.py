"""The ways to run a model that ``estimate`` compares: how each runs the layers and the head."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_patch.estimate.model import QuantizedLinear, TrainingStep
from liger_patch.estimate.operations import Unpacked, sliced_rows
from liger_patch.kernels.chunk_sizes import chunk_rows, rows_before_count, summed_chunk_rows
from liger_patch.kernels.gated_mlp import run_gated_mlp
from liger_patch.kernels.head.chunked import ALIGNED_V
from liger_patch.kernels.head.inputs import MIB, default_chunk_mib
from liger_patch.kernels.lora.linears import run_lora_linears
from liger_patch.kernels.lora.projection import LoraProjection
from liger_patch.layers.checks import layers_of
from liger_patch.layers.long_rows import source_of
from liger_patch.layers.quantized_base import Fp8Linear
from liger_patch.layers.replace import replace_layers


@dataclass(frozen=True)
class Contender:
    """A way to run a model.

    Attributes:
        name: its name in the report.
        head: which loss it has: "logits" (eager) or "chunks" (liger_patch).
        layers: the layers that run on kernels, as ``apply_patch`` names them.
        slices: whether, where a row is long, feed-forward layers on kernels run in slices and LoRA
            projections keep a norm's input in place of its result.
    """

    name: str
    head: str = "logits"
    layers: frozenset[str] = frozenset()
    slices: bool = True


KERNELS = frozenset({"rms_norm", "rotary", "attention", "gated", "experts", "lora"})
EAGER = Contender("eager")
OURS_HEAD = Contender("liger_patch, layers=False", "chunks")
OURS = Contender("liger_patch", "chunks", KERNELS)
CONTENDERS = (EAGER, OURS_HEAD, OURS)


def chunk_bytes(weight: Tensor, step: TrainingStep) -> int:
    """Return the bytes that a head (V, H) holds besides its gradients: a chunk of logits, and what
    a float32 sum of the weight's gradient takes more than the gradient.
    """
    tokens, itemsize = step.batch * step.length, (step.autocast or step.dtype).itemsize
    row_bytes = -(-weight.shape[0] // ALIGNED_V) * ALIGNED_V * itemsize
    budget = int((step.chunk_mib or default_chunk_mib(weight.requires_grad)) * MIB)
    first = rows_before_count(tokens, row_bytes, budget)
    supervised = max(1, round(tokens * step.supervised))
    if first or not weight.requires_grad or weight.dtype.itemsize >= 4:
        return (first or chunk_rows(supervised, row_bytes, budget)) * row_bytes
    wide = 4 * weight.numel()
    rows, widens = summed_chunk_rows(supervised, row_bytes, budget, wide)
    chunk = rows * row_bytes
    return max(chunk + wide // 2, wide) if widens else chunk


def set_layers(model: Any, step: TrainingStep, contender: Contender) -> None:
    """Give the layers the forwards of the contender."""
    if contender.layers:
        replace_layers(model, contender.layers - {"lora"})
    on_kernels = "lora" in contender.layers and step.lora_rank
    dtype = step.autocast or step.dtype
    plain = step.autocast is not None or step.adapter_dtype == step.dtype
    how = dtype, contender.slices
    for module in list(model.modules()):
        if on_kernels and plain and _is_gated(module):
            module.forward = functools.partial(_lora_feed_forward, module, *how)
        if _is_lora(module):
            if on_kernels and plain:
                module.forward = functools.partial(_lora_linear, module, *how)
            elif isinstance(module.base_layer, QuantizedLinear):
                module.forward = functools.partial(_lora_on_quantized, module, step)


def _is_lora(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and isinstance(module.base_layer, nn.Linear)  # pyright: ignore


def _is_gated(module: Any) -> bool:
    names = "gate_proj", "up_proj", "down_proj"
    return "gated" in layers_of(module) and all(
        _is_lora(getattr(module, name, nn.Identity())) for name in names
    )


def _projection(layer: Any, dtype: torch.dtype) -> LoraProjection:
    """Return a layer's projection without dropout, which the kernels compute of a seed."""
    base, a, b = layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]
    if isinstance(base, Fp8Linear):
        weight: Any = base.held(dtype)
    else:
        is_quantized = isinstance(base, QuantizedLinear)
        weight = Unpacked(base.weight, dtype) if is_quantized else base.weight
    return LoraProjection(weight, base.bias, a.weight, b.weight, layer.scaling["default"])


def _lora_linear(layer: Any, dtype: torch.dtype, slices: bool, x: Tensor) -> Tensor:
    source = source_of(x) if slices else None
    (y,) = run_lora_linears(x, [_projection(layer, dtype)], dtype, source)
    return y


def _lora_feed_forward(module: Any, dtype: torch.dtype, slices: bool, x: Tensor) -> Tensor:
    layers = module.gate_proj, module.up_proj, module.down_proj
    gate, up, down = (_projection(each, dtype) for each in layers)
    rows = sliced_rows(x, len(down.a[0]), dtype) if slices else None
    return run_gated_mlp(x, gate, up, down, dtype, "silu", rows)


def _lora_on_quantized(layer: Any, step: TrainingStep, x: Tensor) -> Tensor:
    """Run PEFT's forward of a bitsandbytes layer: without a cast of x under autocast."""
    result = layer.base_layer(x)
    if step.bits == 4:
        result = result.clone()
    a, b = layer.lora_A["default"], layer.lora_B["default"]
    if step.autocast is None:
        x = x.to(a.weight.dtype)
    added = b(a(layer.lora_dropout["default"](x))) * 2.0
    return result + (added.to(result.dtype) if step.autocast is None else added)
