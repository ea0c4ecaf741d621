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


class Halved(torch.autograd.Function):
    """Somebody's autograd function that returns its input: it sees the logits below Python's
    dispatch of tensor subclasses.
    """

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        return grad_output * 0.5


def own_loss(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().sum()


def by_retain_grad(logits: Tensor, loss: Any = own_loss) -> Tensor:
    logits.retain_grad()
    logits.retain_grad()
    assert logits.grad is None
    loss(logits).backward(retain_graph=True)
    loss(logits).backward()
    assert logits.grad is not None
    return logits.grad


def by_hook(logits: Tensor, loss: Any = own_loss) -> Tensor:
    seen: list[Tensor] = []
    logits.register_hook(seen.append).remove()
    logits.register_hook(seen.append)
    loss(logits).backward()
    assert len(seen) == 1
    return seen[0]


def by_hook_in_somebodys_function(logits: Tensor) -> Tensor:
    return by_hook(logits, lambda logits: own_loss(Halved.apply(logits)))


def by_retain_grad_in_somebodys_function(logits: Tensor) -> Tensor:
    return by_retain_grad(logits, lambda logits: own_loss(Halved.apply(logits)) + own_loss(logits))


def by_hook_before_a_view(logits: Tensor) -> Tensor:
    view, seen = logits[:, 1:], []
    logits.register_hook(seen.append)
    own_loss(view).backward()
    return seen[0]


def by_autograd_grad(logits: Tensor) -> Tensor:
    return torch.autograd.grad(own_loss(logits), logits)[0]


def by_autograd_grad_of_a_view(logits: Tensor) -> Tensor:
    view = logits.view(-1, V)
    return torch.autograd.grad(own_loss(view[1:]) + own_loss(logits), view, allow_unused=True)[0]


def unused(logits: Tensor) -> Tensor:
    other = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(other.sum(), [logits], materialize_grads=True)
    return gradient


GRADIENTS = [
    by_retain_grad,
    by_hook,
    by_hook_in_somebodys_function,
    by_retain_grad_in_somebodys_function,
    by_hook_before_a_view,
    by_autograd_grad,
    by_autograd_grad_of_a_view,
]


def in_the_head(model: Any, ask: Any) -> list[Any]:
    """Ask for something of the logits behind the head, before the loss."""
    seen: list[Any] = []
    model.lm_head.register_forward_hook(lambda *call: seen.append(ask(call[-1])))
    return seen


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_gradient_to_the_logits_before_the_loss_is_eagers_and_reads_them(gradient: Any) -> None:
    model = tiny_model(LLAMA)
    batch = tiny_batch(model)
    seen = in_the_head(model, gradient)
    eager = call(model, batch).loss
    with patched(model), pytest.warns(UserWarning, match=r"were read by \w+ before the loss"):
        ours = call(model, batch).loss
    torch.testing.assert_close([ours, seen[1]], [eager, seen[0]])


@pytest.mark.parametrize("ask", [by_retain_grad, by_hook, by_autograd_grad, unused])
@pytest.mark.parametrize("read", [False, True])
def test_a_gradient_to_the_logits_after_a_fused_loss_is_an_error(
    read: bool, ask: Any, outputs: Any
) -> None:
    if read:
        outputs.logits.sum()
    with pytest.raises(RuntimeError, match=r"no gradient with respect to them.*RETURN_LOGITS=1"):
        ask(outputs.logits)
    outputs.logits[:, -1].retain_grad()  # of which no loss is computed
    outputs.loss.backward()


def of_a_copy_read_before(logits: Tensor) -> Tensor:
    part = (logits * 2).sum()
    return torch.autograd.grad(part + own_loss(logits), logits)[0]


def of_a_copy_read_after(logits: Tensor) -> Tensor:
    copy = logits[:, 1:].contiguous() * 2
    logits.register_hook(print)
    return own_loss(copy)


def of_somebodys_function(logits: Tensor) -> Tensor:
    return torch.autograd.grad(own_loss(Halved.apply(logits)), logits)[0]


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (of_somebodys_function, "to not have been used in the graph"),
        (of_a_copy_read_before, "values copied before this call, have no gradient"),
        (of_a_copy_read_after, "made before register_hook has no part in their gradient"),
    ],
)
def test_a_gradient_that_does_not_pass_through_the_logits_is_an_error(ask: Any, error: str) -> None:
    model = apply_patch(tiny_model(LLAMA))
    in_the_head(model, ask)
    with pytest.raises(RuntimeError, match=error):
        call(model, tiny_batch(model))


def test_a_copy_without_gradients_leaves_no_gradient_out() -> None:
    def ask(logits: Tensor) -> Tensor:
        with torch.no_grad():
            maximum = logits.bfloat16().amax()
        return by_hook(logits) * maximum

    model = apply_patch(tiny_model(LLAMA))
    seen = in_the_head(model, ask)
    with pytest.warns(UserWarning, match="were read by amax"):
        call(model, tiny_batch(model))
    assert seen[0].any()


@pytest.mark.parametrize("read", [False, True])
def test_a_hook_on_what_somebodys_function_returned_runs_once(read: bool) -> None:
    def ask(logits: Tensor) -> Tensor:
        halved, seen = Halved.apply(logits), []
        if read:
            halved.sum()
        halved.register_hook(seen.append)
        own_loss(halved).backward()
        assert len(seen) == 1
        return seen[0]

    model = tiny_model(LLAMA)
    batch = tiny_batch(model)
    seen = in_the_head(model, ask)
    call(model, batch)
    with patched(model), pytest.warns(UserWarning, match="were read by"):
        call(model, batch)
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
