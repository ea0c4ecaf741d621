"""Steps over quantized weights, beside steps over what these are dequantized to."""

from __future__ import annotations

from typing import Any

import torch
import training_step
from lora_models import peft
from torch import Tensor, nn
from training_step import with_checkpoints


def step(model: Any, *, autocast: bool = False) -> dict[str, Tensor]:
    """The loss of one batch and all gradients, by name."""
    ids = torch.arange(24).view(2, 12) % model.config.vocab_size
    found = training_step.step(model, {"input_ids": ids, "labels": ids}, autocast=autocast)
    return {name: value for name, value in found.items() if value is not None}


def with_adapters(model: Any, **options: Any) -> Any:
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    for name, each in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(each, std=0.2)
    return model


def check_checkpoints(model: Any, reentrant: bool) -> None:
    truth = step(model)
    assert_close(step(with_checkpoints(model, reentrant)), truth)


def check_evaluation(quantized: Any, truth: Any) -> None:
    """Generation, and logits without adapters."""
    ids = torch.arange(5)[None]
    how: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    found, expected = (each.generate(input_ids=ids, **how) for each in (quantized, truth))
    assert torch.equal(found, expected)
    with quantized.disable_adapter(), truth.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(quantized(ids).logits, truth(ids).logits, rtol=1e-4, atol=1e-4)


def assert_close(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """In float32, from two orders of the same operations."""
    assert ours.keys() == truth.keys()
    for name, value in truth.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5 * scale + 1e-9)
