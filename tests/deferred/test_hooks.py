"""Hooks on deferred logits, and gradients with respect to them: eager's, or an error."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from tiny_models import VOCAB_SIZE as V
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import call, patched, step, widened

from liger_patch import apply_patch, patch_status, registry

ROWS = [row for row in registry.ARCHITECTURES if row.model_type in ("gemma2", "llama")]
LLAMA = next(row for row in ROWS if row.model_type == "llama")


@pytest.mark.parametrize("ask", [lambda x: x.register_hook(print), lambda x: x.retain_grad()])
def test_the_gradient_of_a_fused_loss_to_the_logits_is_an_error(ask: Any, outputs: Any) -> None:
    ask(outputs.logits)
    with pytest.raises(RuntimeError, match="LIGER_PATCH_RETURN_LOGITS=1"):
        outputs.loss.backward()


@pytest.mark.parametrize("ask", [lambda x: x.register_hook(print), lambda x: x.retain_grad()])
def test_a_hook_on_logits_that_require_no_gradient_is_an_error(ask: Any) -> None:
    model = apply_patch(tiny_model(LLAMA))
    with torch.no_grad():
        logits = call(model, tiny_batch(model)).logits
    with pytest.raises(RuntimeError, match=r"of outputs\.logits, which require no gradient"):
        ask(logits)


@pytest.mark.parametrize("allow_unused", [None, True])
@pytest.mark.parametrize("read", [False, True])
def test_autograd_grad_of_a_fused_loss_by_the_logits_is_an_error(
    read: bool, allow_unused: bool | None, outputs: Any
) -> None:
    if read:
        outputs.logits.sum()
    with pytest.raises(RuntimeError, match="no gradient with respect to them"):
        torch.autograd.grad(outputs.loss, outputs.logits, allow_unused=allow_unused)


def own_loss(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().sum()


def by_retain_grad(logits: Tensor) -> Tensor:
    logits.retain_grad()
    own_loss(logits).backward()
    assert logits.grad is not None
    return logits.grad


def by_hook(logits: Tensor) -> Tensor:
    seen: list[Tensor] = []
    logits.register_hook(seen.append)
    own_loss(logits).backward()
    return seen[0]


def by_autograd_grad(logits: Tensor) -> Tensor:
    return torch.autograd.grad(own_loss(logits), logits)[0]


def by_hook_behind_a_copy(logits: Tensor) -> Tensor:
    copy, seen = logits[:, 1:].contiguous() * 2, []
    logits.register_hook(seen.append)
    own_loss(copy).backward()
    return seen[0]


def by_retain_grad_behind_a_cast(logits: Tensor) -> Tensor:
    copy = logits / 2
    logits.retain_grad()
    (own_loss(copy) + own_loss(logits)).backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize(
    "gradient",
    [
        by_retain_grad,
        by_hook,
        by_autograd_grad,
        by_hook_behind_a_copy,
        by_retain_grad_behind_a_cast,
    ],
)
def test_the_gradient_of_a_loss_of_ones_own_to_the_logits_is_eagers(gradient: Any) -> None:
    model = tiny_model(LLAMA)
    batch = tiny_batch(model)
    eager = gradient(call(model, batch).logits)
    with patched(model):
        torch.testing.assert_close(gradient(call(model, batch).logits), eager)


def test_a_hook_that_is_removed_waits_for_nothing(outputs: Any) -> None:
    outputs.logits.register_hook(print).remove()
    outputs.logits[:, -1].retain_grad()  # of which no loss is computed
    outputs.loss.backward()


def test_logits_that_a_loss_does_not_depend_on_have_no_gradient(outputs: Any) -> None:
    logits, other = outputs.logits, torch.ones(3, requires_grad=True)
    gradients = torch.autograd.grad(other.sum(), [other, logits], allow_unused=True)
    assert gradients[1] is None
    (zeros,) = torch.autograd.grad(other.sum(), [logits], materialize_grads=True)
    assert not zeros.any()


@pytest.mark.parametrize("copied", [False, True])
def test_a_part_of_the_gradient_to_the_logits_is_an_error(copied: bool, outputs: Any) -> None:
    """What a fused loss, or a copy that was computed before, leaves out."""
    part = (outputs.logits * 2).sum() if copied else outputs.loss
    total = part + own_loss(outputs.logits)
    with pytest.raises(RuntimeError, match="no gradient with respect to them"):
        torch.autograd.grad(total, outputs.logits)


def test_a_hook_of_the_head_that_asks_for_the_gradient_makes_the_loss_fall_back() -> None:
    model = tiny_model(LLAMA)
    batch = tiny_batch(model)
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda *c: c[-1].register_hook(seen.append) and None)
    eager = step(model, batch)
    apply_patch(model)
    with pytest.warns(UserWarning, match="were read by register_hook"):
        ours = step(model, batch)
    torch.testing.assert_close(ours, eager)
    torch.testing.assert_close(seen[1], seen[0])


def hooked_by_an_engine(logits: Tensor, seen: list[Tensor]) -> Any:
    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return 0.5 * gradient

    hook.__module__ = "deepspeed.runtime.utils"  # deepspeed_of_mine would be no engine
    return logits.register_hook(hook)


def test_hooks_of_engines_wait_for_the_gradient_of_a_loss_of_ones_own() -> None:
    results = []
    for patch in (False, True):
        model = tiny_model(LLAMA)
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


def read_in_a_hook(head: nn.Module, arguments: Any, logits: Tensor) -> None:
    assert logits.shape[-1] == V
    logits.detach().amax()


def replaced_in_a_hook(head: nn.Module, arguments: Any, logits: Tensor) -> Tensor:
    logits[..., :5] = -3.0
    return logits


def scaled_in_a_hook(head: nn.Module, arguments: Any, logits: Tensor) -> Tensor:
    return logits * 0.5


@pytest.mark.parametrize("hook", [read_in_a_hook, replaced_in_a_hook])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model_type)
def test_logits_read_before_the_loss_give_an_ordinary_loss_and_a_warning(
    row: registry.Architecture, hook: Any
) -> None:
    model = widened(tiny_model(row))
    model.lm_head.register_forward_hook(hook)
    truth = step(model, tiny_batch(model))
    with patched(model):
        with pytest.warns(UserWarning, match="ordinary logits and an ordinary loss") as warned:
            ours = step(model, tiny_batch(model))
        assert len(warned) == 1
        assert patch_status(model).fused is False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(step(model, tiny_batch(model))["loss"], ours["loss"])
    assert_no_worse(ours, truth, truth, torch.float32)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model_type)
def test_a_hook_that_scales_the_logits_is_fused(row: registry.Architecture) -> None:
    model = widened(tiny_model(row))
    model.lm_head.register_forward_hook(scaled_in_a_hook)
    truth = step(model, tiny_batch(model))
    with patched(model):
        ours = step(model, tiny_batch(model))
        assert patch_status(model).fused
    assert_no_worse(ours, truth, truth, torch.float32)


def test_a_hook_that_waits_for_the_gradient_of_the_logits_is_an_error(outputs: Any) -> None:
    """Also one that removes itself, or that uses what torch's own hooks are made of."""
    fn = torch.distributed.is_available

    def once(gradient: Tensor) -> None:
        handle.remove()
        fn()

    handle = outputs.logits.register_hook(once)
    with pytest.raises(RuntimeError, match="no gradient with respect to them"):
        outputs.loss.backward()
