"""Small checkpointed models, patched to hold layer inputs in other memory of the CPU, and steps to
compare bit for bit.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_same_bits
from torch import Tensor, nn
from training_step import with_checkpoints
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_patch import apply_patch
from liger_patch.patch.forward import record_of
from liger_patch.patch.offload import CheckpointOffload
from liger_patch.readers.wrapped_model import transformers_model

KINDS = pytest.mark.parametrize("reentrant", [False, True])


def model_of(reentrant: bool | None = False, **options: Any) -> PreTrainedModel:
    """A Llama with dropout, by default of three layers; ``reentrant=None``: no checkpointing."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    defaults = {"attn_implementation": "eager", "attention_dropout": 0.5, **sizes}
    config = LlamaConfig(**(defaults | options))
    torch.manual_seed(0)
    return with_checkpoints(LlamaForCausalLM(config).train(), reentrant)


def offloaded(model: Any, **options: Any) -> CheckpointOffload:
    """Patch a model on the CPU to hold its checkpoints in other host memory."""
    apply_patch(model, checkpoint_offload=True, **options)
    offload = CheckpointOffload(device_types=("cpu",), min_bytes=1)
    record = record_of(transformers_model(model))
    assert record is not None
    assert record.offload is not None
    record.offload = offload
    return offload


def step(model: Any, seed: int = 0) -> dict[str, Tensor]:
    """Loss and gradients of a call."""
    batch = tiny_batch_of(model, seed)
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def tiny_batch_of(model: Any, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids.to(model.device), "labels": ids.to(model.device)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_as_without(
    run: Callable[[Any], Any], make: Callable[[], Any] = model_of
) -> CheckpointOffload:
    """Run a patched model whose checkpoints are offloaded, and one whose are not: what the runs
    return, or else the gradients behind them, are the same bit for bit.
    """
    results = []
    for is_offloaded in (False, True):
        model = apply_patch(make())
        offload = offloaded(model) if is_offloaded else None
        torch.manual_seed(0)
        results.append(run(model) or gradients(model))
    assert len(results[0]) > 1
    assert_same_bits(results[1], results[0])
    assert offload is not None
    return offload


def inputs_alive(model: Any, call: Callable[[], Any]) -> tuple[Any, list[bool]]:
    """Return a call's result, and for each decoder layer whether its input's memory is held."""
    storages: list[Any] = []

    def note(module: nn.Module, args: tuple) -> None:
        storages.append(weakref.ref(args[0].untyped_storage()))

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    handles = [layer.register_forward_pre_hook(note) for layer in layers]
    result = call()
    for handle in handles:
        handle.remove()
    gc.collect()
    return result, [storage() is not None for storage in storages]
