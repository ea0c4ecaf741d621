"""Trace one training step of a model, as each contender runs it."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_patch.estimate.contenders import Contender, chunk_bytes, set_layers
from liger_patch.estimate.model import QuantizedLinear, Sizes, TrainingStep, build
from liger_patch.estimate.offload import MetaOffload, noting_input
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
from liger_patch.kernels.lora import mlp as lora_mlp
from liger_patch.layers import experts, masked_attention, masks, mlp
from liger_patch.patch import offload as checkpoints

IS_AUTOCAST_ENABLED, AUTOCAST = torch.is_autocast_enabled, torch.autocast
GET_AUTOCAST_DTYPE = torch.get_autocast_dtype
_ONE_AT_A_TIME = threading.RLock()  # what a trace replaces is the process's
_BAR: ContextVar[tqdm | None] = ContextVar("_BAR", default=None)


@contextmanager
def progress(most: int) -> Iterator[None]:
    """Show a bar of the steps that are traced, at most so many, where stderr is a terminal."""
    with tqdm(total=most, unit=" steps", disable=None, leave=False) as bar:
        token = _BAR.set(bar)
        try:
            yield
        finally:
            _BAR.reset(token)


@torch.inference_mode(False)
@torch.enable_grad()
def trace_step(
    config: Any, step: TrainingStep, contender: Contender, *, short_masks: bool = True
) -> tuple[Trace, Sizes]:
    """Return what a step of a model allocates, and the sizes of its weights. Models that other
    threads train meanwhile stay as they are.

    Args:
        short_masks: whether liger_patch makes the masks of short rows, as it does on a GPU. Without
            them, rows of any length allocate the same pieces.

    Raises:
        ValueError: a model whose step needs the values of its tensors, or without kernels.
    """
    bar = _BAR.get()
    if bar is not None:
        bar.set_description(f"tracing {contender.name}, {step.length:,} tokens")
    model, sizes = build(config, step)
    held = [*model.parameters(), *model.buffers()]
    quantized = [each.weight for each in model.modules() if isinstance(each, QuantizedLinear)]
    operations = GpuOperations(step.autocast, contender.slices)
    offload = None
    if step.checkpoint_offload and contender.head == "chunks":
        offload = MetaOffload(step.host_gib)
        held.append(offload.piece)
    memory = MemoryTrace(held, quantized)
    with torch.device("meta"):
        ids = torch.empty(step.batch, step.length, dtype=torch.long)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    set_layers(inner, step, contender)
    with _ONE_AT_A_TIME, ExitStack() as stack:
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
        read = functools.partial(_quantized_weight, step)
        stack.enter_context(_stood_in(mlp, "_quantized_weight", read))
        for module in (mlp, experts):
            for name in ("tokens_of_slice", "autocast_dtype"):
                stack.enter_context(_stood_in(module, name, getattr(operations, name)))
        for module in (gated_mlp, kernels_of_experts):
            stack.enter_context(_stood_in(module, "slices_of", first_slices))
        stack.enter_context(_stood_in(lora_mlp, "activate", activate))
        stack.enter_context(_stood_in(lora_mlp, "activate_backward", activate_backward))
        # the only masks are those of sliding windows: rows are whole
        for name in ("serves_flash_attention", "segments_of", "segment_attention"):
            stack.enter_context(_stood_in(masked_attention, name, getattr(operations, name)))
        if not short_masks:
            stack.enter_context(_replaced(masks, "LEAST_NUMBERS", 1))
        for name in ("may_serve_flash_attention", "segments_of_intervals"):
            stack.enter_context(_stood_in(masks, name, getattr(operations, name)))
        stack.enter_context(masked_attention.UsedTokens())
        # with torch 2.6, these questions about the meta device are errors
        stack.enter_context(_replaced(torch, "is_autocast_enabled", _is_autocast_enabled))
        stack.enter_context(_replaced(torch, "get_autocast_dtype", _get_autocast_dtype))
        stack.enter_context(_replaced(torch, "autocast", _autocast))
        stack.enter_context(memory)
        labels = ids if contender.head == "logits" else None
        if offload is not None:
            stack.enter_context(_stood_in(checkpoints, "LayerInput", noting_input(memory)))
        with operations, _offloading(inner, offload):
            out = model(input_ids=ids, labels=labels, use_cache=False)
            loss = out.loss
            if loss is None:
                if offload is not None:
                    offload.before_loss()
                loss = _head_loss(found.pop(), head, step, memory)
            del out
        memory.start_backward()
        loss.backward()
        memory.close_backward()
        del loss
    if bar is not None:
        bar.update()
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return memory.finish(gradients), sizes


@contextmanager
def _offloading(model: Any, offload: MetaOffload | None) -> Iterator[None]:
    if offload is None:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of inputs that stay on the device
        with offload.forward_pass(model):
            yield


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


def _quantized_weight(step: TrainingStep, layer: nn.Module, _: torch.dtype) -> Any:
    """Return the weight of a layer without adapters as feed-forward layers in slices read it."""
    if not isinstance(layer, QuantizedLinear) or step.bits != 4 or layer.bias is not None:
        return None
    return Unpacked(layer.weight, step.autocast or step.dtype)


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

    def enter_layer(*_: Any) -> None:
        memory.enter(LAYER)

    def leave_layer(*_: Any) -> None:
        memory.leave_layer()

    def enter_head(_: nn.Module, args: tuple[Any, ...]) -> None:
        memory.enter(HEAD)
        if args[0].requires_grad:
            args[0].register_hook(lambda _: memory.leave_head())

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(enter_layer)
            module.register_forward_hook(leave_layer)
    head.register_forward_pre_hook(enter_head)


def _stood_in(module: Any, name: str, stand_in: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let a function of a module be another one, in calls of this thread."""
    own, thread = getattr(module, name), threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        function = stand_in if threading.get_ident() == thread else own
        return function(*args, **kwargs)

    return _replaced(module, name, chosen)


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
