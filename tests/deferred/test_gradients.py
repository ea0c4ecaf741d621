"""Gradients through deferred logits are those through eager logits, whoever asks for them. Hooks on
them: those of engines wait, any other is an error.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from slow_cases import slow_but
from tiny_models import VOCAB_SIZE as V
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import Float64, Step, call, gradients, patched, widened

from liger_patch import apply_patch, patch_status
from liger_patch.deferred.tensor import DeferredLogits

TEACHER = torch.rand(2, 9, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Doubled(torch.autograd.Function):
    """Somebody's own function: it sees the logits below Python's dispatch of tensor subclasses."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return (logits * logits).sum()

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return 2 * logits * grad_output


class Halved(torch.autograd.Function):
    """Somebody's own function that hands its input on."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        return grad_output * 0.5


def halved_loss(outputs: Any) -> Tensor:
    logits = Halved.apply(outputs.logits)
    return nn.functional.cross_entropy(logits.reshape(-1, V), torch.arange(18))


def kl_divergence(outputs: Any) -> Tensor:
    log_probabilities = outputs.logits.log_softmax(-1)
    return nn.functional.kl_div(log_probabilities, TEACHER.softmax(-1), reduction="batchmean")


def native_cross_entropy(outputs: Any) -> Tensor:
    labels = torch.arange(16) % V
    logits = outputs.logits[:, 1:].reshape(-1, V)
    return torch._C._nn.cross_entropy_loss(logits, labels, None, 1, -100, 0.0)


def read_first(outputs: Any, mode: Callable[[], Any]) -> Tensor:
    with mode():
        outputs.logits.argmax(-1)
    return outputs.logits.square().mean()


def target_made_under_no_grad(outputs: Any) -> Tensor:
    with torch.no_grad():
        target = outputs.logits[:, 1:] * 0.5
    return (outputs.logits[:, 1:] * target).mean()


def written_to(outputs: Any) -> Tensor:
    logits = outputs.logits
    logits[:, 2:4] = 0.0
    logits[..., 0].mul_(3.0)
    return logits.square().mean()


def slice_written_to(outputs: Any) -> Tensor:
    part = outputs.logits[:, 1:]
    doubled = outputs.logits * 2
    part[0].mul_(2.0)
    return outputs.logits.square().mean() + part.mean() + doubled.tanh().mean()


# a term that user code makes of the outputs, beside the loss or instead of it
TERMS: dict[str, Callable[[Any], Tensor]] = {
    "kl divergence": kl_divergence,
    "one slice": lambda outputs: outputs.logits[:, -1].square().sum(),
    "a mask": lambda outputs: outputs.logits[torch.eye(2, 9, dtype=torch.bool)].square().sum(),
    "nested views": lambda outputs: outputs.logits[:, 1:][1].view(4, 2, V)[2, 1].square().sum(),
    "softcapped": lambda outputs: (torch.tanh(outputs.logits / 2.0) * 2.0).square().sum(),
    "own function": lambda outputs: Doubled.apply(outputs.logits),
    "own function of steps": lambda outputs: Doubled.apply((outputs.logits / 2.0).tanh()[:, 1:]),
    "own function that hands on": halved_loss,
    "native": native_cross_entropy,
    "read under no_grad first": lambda outputs: read_first(outputs, torch.no_grad),
    "read in inference mode first": lambda outputs: read_first(outputs, torch.inference_mode),
    "target made under no_grad": target_made_under_no_grad,
    "detached": lambda outputs: (outputs.logits * outputs.logits.detach()).mean(),
    "data": lambda outputs: (outputs.logits * outputs.logits.data).mean(),
    "written to": written_to,
    "slice written to": slice_written_to,
}


def step_with(model: Any, batch: dict, term: Callable, with_loss: bool) -> Step:
    outputs = call(model, batch)
    with Float64():
        loss = term(outputs) + outputs.loss if with_loss else term(outputs)
    return {"loss": loss.detach(), **gradients(model, loss)}


@pytest.mark.parametrize("with_loss", [True, False])
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("model_type", slow_but(["gemma2"], ["gemma2", "llama"]))
def test_a_term_of_the_logits_has_eagers_gradients(
    model_type: str, name: str, with_loss: bool
) -> None:
    model = widened(tiny_model(model_type))
    truth = step_with(model, tiny_batch(model), TERMS[name], with_loss)
    with patched(model):
        ours = step_with(model, tiny_batch(model), TERMS[name], with_loss)
        assert patch_status(model).fused
    assert_no_worse(ours, truth, truth, torch.float32)


def test_logits_alone_can_be_differentiated() -> None:
    results = []
    for model in (tiny_model(), apply_patch(tiny_model())):
        logits = call(model, tiny_batch(model)).logits
        upstream = TEACHER.float()
        inputs = [model.lm_head.weight, model.model.norm.weight]
        with_grad = torch.autograd.grad(logits, inputs, upstream, retain_graph=True)
        torch.autograd.backward([logits], [upstream])
        results.append([*with_grad, *(tensor.grad for tensor in inputs)])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)


def test_a_second_backward_through_the_logits_is_the_same(patched_model: Any, outputs: Any) -> None:
    logits = outputs.logits
    loss = Doubled.apply(logits / 2)
    first, second = (
        torch.autograd.grad(loss, patched_model.lm_head.weight, retain_graph=True)[0]
        for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("read_first", [False, True])
def test_what_was_made_under_no_grad_has_no_gradient(
    read_first: bool, patched_model: Any, outputs: Any
) -> None:
    logits = outputs.logits
    if read_first:
        logits + 0
    with torch.no_grad():
        made = [logits[:, 1:], logits * 2, logits.view(-1, V), logits.bfloat16(), logits.tanh()]
    for tensor in made:
        assert tensor.grad_fn is None
        for derived in (tensor * 2 + 0, tensor[1:], tensor[..., :1].exp()):
            # of a view that was made under no_grad, PyTorch says that it needs a gradient
            if derived.requires_grad:
                total = derived.float().sum()
                (gradient,) = torch.autograd.grad(
                    total, patched_model.lm_head.weight, allow_unused=True
                )
                assert gradient is None
    assert (logits * 2).requires_grad


def test_a_loss_of_logits_made_under_no_grad_needs_no_gradient(
    patched_model: Any, outputs: Any
) -> None:
    def has_gradient(logits: Tensor) -> bool:
        labels = torch.zeros(18, dtype=torch.int64)
        return nn.functional.cross_entropy(logits.view(-1, V), labels).requires_grad

    with torch.no_grad():
        model_call = call(patched_model, tiny_batch(patched_model)).logits
        view = outputs.logits.view(-1, V)
        assert not has_gradient(view)
    assert not has_gradient(model_call)
    assert not has_gradient(view)
    assert not has_gradient(outputs.logits.detach())
    assert has_gradient(outputs.logits)


def test_a_frozen_model_has_no_gradient() -> None:
    model = apply_patch(tiny_model()).requires_grad_(False)
    outputs = call(model, tiny_batch(model))
    assert not outputs.loss.requires_grad
    assert not outputs.logits.requires_grad


def test_functional_call_uses_the_given_parameters(model: Any) -> None:
    batch = tiny_batch(model)
    parameters = {n: (p.detach() * 0.5).requires_grad_() for n, p in model.named_parameters()}
    results = []
    for patch in (False, True):
        if patch:
            apply_patch(model)
        outputs = torch.func.functional_call(model, parameters, kwargs=batch)
        grads = torch.autograd.grad(outputs.loss, list(parameters.values()))
        results.append([outputs.loss, outputs.logits, *grads])
    assert patch_status(model).fused
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("disabled", [False, True])
def test_hooks_of_saved_tensors_read_no_logits_and_may_be_disabled(disabled: bool) -> None:
    """Those in front of a softcap, which are saved."""
    model = apply_patch(tiny_model("gemma2"))
    batch = tiny_batch(model)
    truth = gradients(model, model(**batch).loss)
    copied: list[Any] = []

    def copy(tensor: Tensor) -> Tensor:
        copied.append(tensor.shape)
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    hooks = torch.autograd.graph.saved_tensors_hooks(copy, lambda tensor: tensor)
    none = torch.autograd.graph.disable_saved_tensors_hooks("none here")
    with none if disabled else hooks:
        loss = model(**batch).loss
    assert patch_status(model).fused
    assert bool(copied) is not disabled
    assert not any(shape[-1:] == (V,) for shape in copied if len(shape) > 1)
    torch.testing.assert_close(gradients(model, loss), truth)


def test_a_loss_that_is_kept_holds_no_logits_after_its_backward_pass() -> None:
    model = apply_patch(tiny_model("gemma2"))
    gc.collect()
    before = held_logits()
    loss = Doubled.apply(call(model, tiny_batch(model)).logits)
    loss.backward()
    assert held_logits() == before


def held_logits() -> int:
    return sum(type(each) is DeferredLogits and each.is_computed for each in gc.get_objects())


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
    results, runs = [], []
    for model in (tiny_model(), apply_patch(tiny_model())):
        outputs, seen = call(model, tiny_batch(model)), []
        hooked_by_an_engine(outputs.logits, seen)
        hooked_by_an_engine(outputs.logits, []).remove()
        outputs.loss.backward(retain_graph=True)
        runs.append(len(seen))
        model.zero_grad()
        own_loss(outputs.logits).backward()
        results.append({"seen": seen[runs[-1]], "head": model.lm_head.weight.grad})
    assert runs == [1, 0]
    torch.testing.assert_close(results[1], results[0])
