"""Hooks on deferred logits: those of engines wait, any other is an error; and hooks of the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import call, patched, step, widened

from liger_patch import apply_patch, patch_status


def own_loss(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().sum()


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize(
    "ask",
    [
        lambda logits: logits.register_hook(print),
        lambda logits: logits.retain_grad(),
        lambda logits: torch.autograd.grad(own_loss(logits), logits),
        lambda logits: torch.autograd.grad(own_loss(logits), [logits], allow_unused=True),
    ],
)
def test_asking_for_the_gradient_of_logits_is_an_error(read: bool, ask: Any, outputs: Any) -> None:
    if read:
        outputs.logits.sum()
    with pytest.raises(RuntimeError, match=r"no gradient with respect to them.*RETURN_LOGITS=1"):
        ask(outputs.logits)
    outputs.loss.backward()


def hooked_by_an_engine(logits: Tensor, seen: list[Tensor]) -> Any:
    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return 0.5 * gradient

    hook.__module__ = "deepspeed.runtime.utils"  # deepspeed_of_mine would be no engine
    return logits.register_hook(hook)


def test_hooks_of_engines_wait_for_the_gradient_of_a_loss_of_ones_own() -> None:
    results = []
    for patch in (False, True):
        model = tiny_model()
        if patch:
            apply_patch(model)
        outputs, seen = call(model, tiny_batch(model)), []
        hooked_by_an_engine(outputs.logits, seen)
        hooked_by_an_engine(outputs.logits, []).remove()
        outputs.loss.backward(retain_graph=True)
        fused = len(seen)
        model.zero_grad()
        own_loss(outputs.logits).backward()
        results.append({"seen": seen[fused], "head": model.lm_head.weight.grad})
        assert fused == (0 if patch else 1)
    torch.testing.assert_close(results[1], results[0])


def scaled_in_a_hook(head: nn.Module, arguments: Any, logits: Tensor) -> Tensor:
    return logits * 0.5


@pytest.mark.parametrize("model_type", ["gemma2", "llama"])
def test_a_hook_that_scales_the_logits_is_fused(model_type: str) -> None:
    model = widened(tiny_model(model_type))
    model.lm_head.register_forward_hook(scaled_in_a_hook)
    truth = step(model, tiny_batch(model))
    with patched(model):
        ours = step(model, tiny_batch(model))
        assert patch_status(model).fused
    assert_no_worse(ours, truth, truth, torch.float32)
