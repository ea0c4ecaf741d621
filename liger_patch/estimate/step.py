"""Trace one training step of a model, as each contender of ``estimate`` runs it."""

from __future__ import annotations

import functools
import math
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_patch.deferred.capture import replace_attribute
from liger_patch.estimate.model import QuantizedLinear, Sizes, TrainingStep, build
from liger_patch.estimate.operations import (
    ChunkedHead,
    GpuOperations,
    Unpacked,
    activate,
    activate_backward,
    first_slices,
)
from liger_patch.estimate.trace import HEAD, LAYER, MemoryTrace, Trace
from liger_patch.kernels import experts as kernels_of_experts
from liger_patch.kernels import gated_mlp
from liger_patch.kernels.chunk_sizes import chunk_rows, rows_before_count, summed_chunk_rows
from liger_patch.kernels.head.chunked import ALIGNED_V
from liger_patch.kernels.head.inputs import MIB, default_chunk_mib
from liger_patch.kernels.lora import mlp as lora_mlp
from liger_patch.kernels.segments import Segments
from liger_patch.layers import experts, lora, masked_attention, masks, mlp
from liger_patch.layers.replace import replace_layers
from liger_patch.patch import offload as checkpoints
from liger_patch.patch.layer_input import PIECE_BYTES, Lane, LayerInput
from liger_patch.readers.quantized_weights import reader_of

IS_AUTOCAST_ENABLED, AUTOCAST = torch.is_autocast_enabled, torch.autocast
GET_AUTOCAST_DTYPE = torch.get_autocast_dtype


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


@torch.inference_mode(False)
@torch.enable_grad()
def trace_step(
    config: Any, step: TrainingStep, contender: Contender, *, short_masks: bool = True
) -> tuple[Trace, Sizes]:
    """Return what a step of a model allocates, and the sizes of its weights. What it replaces is
    the process's: no other model may run meanwhile.

    Args:
        short_masks: whether liger_patch makes the masks of short rows, as it does on a GPU. Without
            them, rows of any length allocate the same pieces.

    Raises:
        Exception: of the model's code, where it needs values (``estimate.explained`` words it).
    """
    model, sizes = build(config, step)
    held = [*model.parameters(), *model.buffers()]
    quantized = [each.weight for each in model.modules() if isinstance(each, QuantizedLinear)]
    operations = GpuOperations(step.autocast, contender.slices)
    offload = None
    if step.checkpoint_offload and contender.head == "chunks":
        offload = MetaOffload()
        held.append(offload.piece)
    memory = MemoryTrace(held, quantized)
    with torch.device("meta"):
        ids = torch.empty(step.batch, step.length, dtype=torch.long)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    set_layers(inner, step, contender)
    with ExitStack() as stack:
        if step.checkpointing:
            options = {
                "use_reentrant": False,
                "preserve_rng_state": False,
                # in the forward pass, these operations run for the whole model
                "context_fn": lambda: (
                    operations if memory.trace.forward_end else nullcontext(),
                    operations,
                ),
            }
            # the second name is the only one that Transformers 5.0 has
            names = "activation_checkpointing_enable", "gradient_checkpointing_enable"
            enable = next(getattr(inner, each) for each in names if hasattr(inner, each))
            enable(options)
        head = inner.get_output_embeddings()
        found: list[Tensor] = []
        _note_places(inner, head, memory)
        if contender.head != "logits":
            head.forward = functools.partial(_stand_in, found)
        stand_ins = STAND_INS + [(*place, getattr(operations, place[1])) for place in OF_GPU]
        if not short_masks:
            stand_ins.append((masks, "LEAST_NUMBERS", 1))
        if offload is not None:
            stand_ins.append((checkpoints, "LayerInput", _noting_input(memory)))
        for place in stand_ins:
            replace_attribute(stack, *place)
        stack.enter_context(masked_attention.UsedTokens())
        stack.enter_context(memory)
        labels = ids if contender.head == "logits" else None
        with operations, nullcontext() if offload is None else offload.forward_pass(inner):
            out = model(input_ids=ids, labels=labels, use_cache=False)
            loss = out.loss
            if loss is None:
                if offload is not None:
                    offload.before_loss()
                loss = _head_loss(found.pop(), head, step, memory)
            del out
        memory.start_backward()
        loss.backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        return memory.finish(gradients), sizes


class MetaOffload(checkpoints.CheckpointOffload):
    """Checkpoint offloading of a model without values. It chooses inputs as on a GPU, with one
    ``piece`` in place of all host memory; ``Trace.sent`` has what was copied.
    """

    def __init__(self) -> None:
        super().__init__(("meta",), host_gib=math.inf)
        self.piece = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="meta")
        self._lane = Lane(torch.device("cpu"))
        self._lane._piece = lambda: self.piece

    def lane(self, device: torch.device) -> Lane:
        return self._lanes.setdefault(device, self._lane)


def _noting_input(memory: MemoryTrace) -> type[LayerInput]:
    """Return a class for ``patch.offload`` that tells a trace of each copy to the host."""

    class NotedInput(LayerInput):
        def send(self, pieces) -> None:
            super().send(pieces)
            assert self.source is not None
            memory.note_sent(self.source)

    return NotedInput


def host_bytes(size: float) -> int:
    """Return the bytes of host memory that a layer input of so many bytes takes."""
    return PIECE_BYTES * math.ceil(size / PIECE_BYTES)


def _is_autocast_enabled(device_type: str | None = None) -> bool:
    if device_type == "meta":
        return False
    return IS_AUTOCAST_ENABLED() if device_type is None else IS_AUTOCAST_ENABLED(device_type)


def _get_autocast_dtype(device_type: str) -> torch.dtype:
    return torch.float32 if device_type == "meta" else GET_AUTOCAST_DTYPE(device_type)


def _autocast(device_type: str, *arguments: Any, **options: Any) -> Any:
    """Autocast, which the meta device does not have: PEFT turns it off for experts' weights."""
    if device_type == "meta":
        return nullcontext()
    return AUTOCAST(device_type, *arguments, **options)


def _reader_of(layer: nn.Module) -> Any:
    is_quantized = isinstance(layer, QuantizedLinear)
    return SimpleNamespace(read=_unpacked) if is_quantized else reader_of(layer)


def _unpacked(layer: nn.Linear, dtype: torch.dtype) -> Unpacked:
    return Unpacked(layer.weight, dtype)


# What runs in the place of functions that need a GPU or values: module, name, what stands in.
STAND_INS: list[tuple[Any, str, Any]] = [
    (gated_mlp, "slices_of", first_slices),
    (kernels_of_experts, "slices_of", first_slices),
    (lora_mlp, "activate", activate),
    (lora_mlp, "activate_backward", activate_backward),
    (lora, "reader_of", _reader_of),
    # with torch 2.6, these questions about the meta device are errors
    (torch, "is_autocast_enabled", _is_autocast_enabled),
    (torch, "get_autocast_dtype", _get_autocast_dtype),
    (torch, "autocast", _autocast),
    # as a GPU answers in 16 bits; the only masks are those of sliding windows: rows are whole
    (masked_attention, "serves_flash_attention", lambda *_: True),
    (masks, "may_serve_flash_attention", lambda *_: True),
    (masked_attention, "segments_of", lambda mask, *_: Segments(None, mask.shape[-1], 1)),
    (
        masks,
        "segments_of_intervals",
        lambda _, real, *more, **how: Segments(None, real.shape[-1], 1),
    ),
]
OF_GPU = [  # functions that methods of GpuOperations of the same name stand in for
    (lora, "_dtypes_of"),
    (lora, "source_of"),
    (lora, "tokens_of_slice"),
    (mlp, "tokens_of_slice"),
    (mlp, "autocast_dtype"),
    (experts, "tokens_of_slice"),
    (experts, "autocast_dtype"),
    (masked_attention, "segment_attention"),
]


def _stand_in(found: list[Tensor], hidden: Tensor) -> Tensor:
    """Keep the hidden states for the loss, and return logits of one class."""
    found.append(hidden)
    return hidden[..., :1]


def _head_loss(hidden: Tensor, head: Any, step: TrainingStep, memory: MemoryTrace) -> Tensor:
    weight: Tensor = getattr(head, "base_layer", head).weight
    chunk = chunk_bytes(weight, step)
    hidden = hidden.to(step.autocast or hidden.dtype)
    return ChunkedHead.apply(hidden, weight, chunk, memory.naming)


def _note_places(model: Any, head: nn.Module, memory: MemoryTrace) -> None:
    """Tell the trace which part of the model runs."""

    def enter_head(_: nn.Module, args: tuple[Any, ...]) -> None:
        memory.enter(HEAD)
        if args[0].requires_grad:
            args[0].register_hook(lambda _: memory.leave_head())

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(lambda *_: memory.enter(LAYER))
            module.register_forward_hook(lambda *_: memory.leave_layer())
    head.register_forward_pre_hook(enter_head)


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
        replace_layers(model, contender.layers)
    if "lora" in contender.layers and (step.autocast or step.adapter_dtype == step.dtype):
        return
    for module in model.modules():
        if isinstance(getattr(module, "base_layer", None), QuantizedLinear):
            module.forward = functools.partial(_lora_on_quantized, module, step)


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
