"""Steps over quantized weights, beside steps over what these are dequantized to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lora_models import LAYER, WAYS, Calls, batch_of, training_step
from torch import Tensor
from training_step import assert_right

from liger_patch import apply_patch, patch_status
from liger_patch.layers.lora import not_plain


def step(model: Any, *, autocast: bool = False) -> dict[str, Tensor]:
    """The loss of one batch and all gradients, by name."""
    ids = torch.arange(24).view(2, 12) % model.config.vocab_size
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach(), **gradients}


def assert_close(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """In float32, from two orders of the same operations."""
    assert ours.keys() == truth.keys()
    for name, value in truth.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5 * scale + 1e-9)


def check_lora_step(
    eager: Any, in_float64: Callable[[Any], Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of LoRA on kernels is no worse than PEFT's.

    Args:
        in_float64: returns the same model with the quantized weights written out.
        way: of WAYS, in whose dtype the model is.
    """
    dtype, _, autocast = WAYS[way]
    model, batch, calls = apply_patch(copy.deepcopy(eager)), batch_of(eager), Calls(monkeypatch)
    theirs = training_step(eager, batch, autocast=autocast)
    calls.clear()
    ours = training_step(model, batch, autocast=autocast)
    assert calls.taken(model) == (LAYER * 2, [])
    assert not_plain(model) == {}
    assert (patch_status(model).fused, patch_status(model).reason) == (True, None)
    assert_right(
        ours, theirs, training_step(in_float64(eager), batch), torch.bfloat16 if autocast else dtype
    )
