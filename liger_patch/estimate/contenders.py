"""The ways to run a model that ``estimate`` compares: how each runs the layers and the head."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_patch.estimate.model import Sizes, TrainingStep
from liger_patch.estimate.operations import LoraDown, LoraGate, LoraLinear, in_slices, sliced_rows
from liger_patch.kernels.chunk_sizes import chunk_rows, rows_before_count, summed_chunk_rows
from liger_patch.kernels.head.chunked import ALIGNED_V
from liger_patch.kernels.head.inputs import MIB, default_chunk_mib
from liger_patch.layers.checks import layers_of
from liger_patch.layers.long_rows import source_of
from liger_patch.layers.replace import replace_layers

KERNELS = frozenset({"rms_norm", "rotary", "gated"})


@dataclass(frozen=True)
class Contender:
    """A way to run a model.

    Attributes:
        name: its name in the report.
        head: which loss it has: "logits" (eager) or "chunks" (liger_patch).
        layers: the layers that run on kernels, of KERNELS, "attention" and "lora".
        slices: whether, where a row is long, feed-forward layers on kernels run in slices and LoRA
            projections keep a norm's input in place of its result.
    """

    name: str
    head: str = "logits"
    layers: frozenset[str] = frozenset()
    slices: bool = True


EAGER = Contender("eager")
OURS_HEAD = Contender("liger_patch, layers=False", "chunks")
OURS = Contender("liger_patch", "chunks", KERNELS | {"attention", "lora"})
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


def set_layers(model: Any, step: TrainingStep, contender: Contender, sizes: Sizes) -> None:
    """Give the layers the forwards of the contender."""
    if contender.layers:
        replace_layers(model, contender.layers - {"lora"})
    on_kernels = "lora" in contender.layers and step.lora_rank
    dtype = step.autocast or step.dtype
    plain = step.autocast is not None or step.adapter_dtype == step.dtype
    for module in list(model.modules()):
        if on_kernels and plain and _is_gated(module):
            quantized = set(map(id, sizes.quantized)) if contender.slices else None
            module.forward = functools.partial(_lora_feed_forward, module, dtype, quantized)
        if _is_lora(module):
            if on_kernels and plain:
                module.forward = functools.partial(_lora_linear, module, dtype, contender.slices)
            elif module.base_layer in sizes.quantized:
                module.forward = functools.partial(_lora_in_4_bits, module, step)


def _is_lora(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and isinstance(module.base_layer, nn.Linear)  # pyright: ignore


def _is_gated(module: Any) -> bool:
    names = "gate_proj", "up_proj", "down_proj"
    return "gated" in layers_of(module) and all(
        _is_lora(getattr(module, name, nn.Identity())) for name in names
    )


def _adapter(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def _lora_linear(layer: Any, dtype: torch.dtype, slices: bool, x: Tensor) -> Tensor:
    source = source_of(x)
    kept = source.x if slices and source is not None else None
    return LoraLinear.apply(x, layer.base_layer.weight, *_adapter(layer), dtype, kept)


def _lora_feed_forward(
    module: Any,
    dtype: torch.dtype,
    quantized: Collection[int] | None,  # ids of layers, None where nothing runs in slices
    x: Tensor,
) -> Tensor:
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    if quantized is not None and sliced_rows(x, down.base_layer.in_features, dtype) is not None:
        bases = [each.base_layer for each in (gate, up, down)]
        copied = [b.weight for b in bases if id(b) in quantized or b.weight.dtype != dtype]
        adapters = [matrix for each in (gate, up, down) for matrix in _adapter(each)]
        return in_slices(x, down.base_layer.weight, dtype, copied, adapters)
    down_a, down_b = _adapter(down)
    adapters = *_adapter(gate), *_adapter(up), down_a
    a = LoraGate.apply(x, gate.base_layer.weight, up.base_layer.weight, dtype, *adapters)
    return LoraDown.apply(a, down.base_layer.weight, down_b, dtype)


def _lora_in_4_bits(layer: Any, step: TrainingStep, x: Tensor) -> Tensor:
    """Run PEFT's forward of a bitsandbytes layer: without a cast of x under autocast."""
    result = layer.base_layer(x).clone()
    a, b = layer.lora_A["default"], layer.lora_B["default"]
    if step.autocast is None:
        x = x.to(a.weight.dtype)
    added = b(a(x)) * 2.0
    return result + (added.to(result.dtype) if step.autocast is None else added)
