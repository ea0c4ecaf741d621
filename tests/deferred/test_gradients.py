"""Gradients through deferred logits are those through eager logits, whoever asks for them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from tiny_models import VOCAB_SIZE as V
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from training_step import Float64, Step, call, gradients, patched, step, widened

from liger_patch import apply_patch, patch_status, registry
from liger_patch.deferred.tensor import DeferredLogits

ROWS = [row for row in registry.ARCHITECTURES if row.model_type in ("gemma2", "llama")]
GEMMA2 = next(row for row in ROWS if row.model_type == "gemma2")
LLAMA = next(row for row in ROWS if row.model_type == "llama")
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


class Sum(torch.autograd.Function):
    """Somebody's own function that saves nothing."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return (logits * 1).sum()

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        return grad_output.expand(ctx.shape).to(ctx.dtype)


def kl_divergence(outputs: Any) -> Tensor:
    log_probabilities = outputs.logits.log_softmax(-1)
    return nn.functional.kl_div(log_probabilities, TEACHER.softmax(-1), reduction="batchmean")


def native_cross_entropy(outputs: Any) -> Tensor:
    labels = torch.arange(16) % V
    logits = outputs.logits[:, 1:].reshape(-1, V)
    return torch._C._nn.cross_entropy_loss(logits, labels, None, 1, -100, 0.0)


def read_under_no_grad_first(outputs: Any) -> Tensor:
    with torch.no_grad():
        outputs.logits.argmax(-1)
    return outputs.logits.square().mean()


def target_made_under_no_grad(outputs: Any) -> Tensor:
    with torch.no_grad():
        target = outputs.logits[:, 1:] * 0.5
    return (outputs.logits[:, 1:] * target).mean()


def view_made_under_no_grad(outputs: Any) -> Tensor:
    with torch.no_grad():
        target = outputs.logits[:, 1:].float()
    return (outputs.logits[:, :-1] * target).mean()


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


def two_readers(outputs: Any) -> Tensor:
    logits = outputs.logits
    return logits[:, 1:].logsumexp(-1).mean() + (logits / 3).tanh().mul(3).square().mean()


# a term that user code makes of the outputs, beside the loss or instead of it
TERMS: dict[str, Callable[[Any], Tensor]] = {
    "kl divergence": kl_divergence,
    "mean": lambda outputs: outputs.logits.mean(),
    "z-loss": lambda outputs: outputs.logits.logsumexp(-1).square().mean(),
    "one slice": lambda outputs: outputs.logits[:, -1].square().sum(),
    "a mask": lambda outputs: outputs.logits[torch.eye(2, 9, dtype=torch.bool)].square().sum(),
    "nested views": lambda outputs: outputs.logits[:, 1:][1].view(4, 2, V)[2, 1].square().sum(),
    "softcapped": lambda outputs: (torch.tanh(outputs.logits / 2.0) * 2.0).square().sum(),
    "own function": lambda outputs: Doubled.apply(outputs.logits),
    "own function of a view": lambda outputs: Doubled.apply(outputs.logits[:, 1:].reshape(16, V)),
    "own function of steps": lambda outputs: Doubled.apply((outputs.logits / 2.0).tanh()[:, 1:]),
    "native": native_cross_entropy,
    "read under no_grad first": read_under_no_grad_first,
    "target made under no_grad": target_made_under_no_grad,
    "view made under no_grad": view_made_under_no_grad,
    "detached": lambda outputs: (outputs.logits * outputs.logits.detach()).mean(),
    "detached steps": lambda outputs: (
        outputs.logits * (outputs.logits / 2).detach().tanh()
    ).mean(),
    "data": lambda outputs: (outputs.logits * outputs.logits.data).mean(),
    "written to": written_to,
    "slice written to": slice_written_to,
    "two readers": two_readers,
}


def step_with(model: Any, batch: dict, term: Callable, with_loss: bool) -> Step:
    outputs = call(model, batch)
    with Float64():
        loss = term(outputs) + outputs.loss if with_loss else term(outputs)
    return {"loss": loss.detach(), **gradients(model, loss)}


@pytest.mark.parametrize("with_loss", [True, False])
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model_type)
def test_a_term_of_the_logits_has_eagers_gradients(
    row: registry.Architecture, name: str, with_loss: bool
) -> None:
    model = widened(tiny_model(row))
    truth = step_with(model, tiny_batch(model), TERMS[name], with_loss)
    with patched(model):
        ours = step_with(model, tiny_batch(model), TERMS[name], with_loss)
        assert patch_status(model).fused
    assert_no_worse(ours, truth, truth, torch.float32)


def test_logits_alone_can_be_differentiated() -> None:
    results = []
    for patch in (False, True):
        model = tiny_model(LLAMA)
        logits = call(apply_patch(model) if patch else model, tiny_batch(model)).logits
        upstream = TEACHER.float()
        inputs = [model.lm_head.weight, model.model.norm.weight]
        with_grad = torch.autograd.grad(logits, inputs, upstream, retain_graph=True)
        torch.autograd.backward([logits], [upstream])
        results.append([*with_grad, *(tensor.grad for tensor in inputs)])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)


def test_a_second_backward_through_the_logits_is_the_same() -> None:
    model = apply_patch(tiny_model(LLAMA))
    logits = call(model, tiny_batch(model)).logits
    loss = Doubled.apply(logits / 2)
    first, second = (
        torch.autograd.grad(loss, model.lm_head.weight, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("read_first", [False, True])
def test_what_was_made_under_no_grad_has_no_gradient(read_first: bool) -> None:
    model = apply_patch(tiny_model(LLAMA))
    logits = call(model, tiny_batch(model)).logits
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
                (gradient,) = torch.autograd.grad(total, model.lm_head.weight, allow_unused=True)
                assert gradient is None
    assert (logits * 2).requires_grad


def test_a_loss_of_logits_made_under_no_grad_needs_no_gradient() -> None:
    model = apply_patch(tiny_model(LLAMA))
    with torch.no_grad():
        outputs = call(model, tiny_batch(model))
    labels = torch.zeros(18, dtype=torch.int64)
    loss = nn.functional.cross_entropy(outputs.logits.view(-1, V), labels)
    assert not loss.requires_grad
    outputs = call(model, tiny_batch(model))
    with torch.no_grad():
        logits = outputs.logits.view(-1, V)
        assert not nn.functional.cross_entropy(logits, labels).requires_grad
    assert not nn.functional.cross_entropy(logits, labels).requires_grad
    assert not nn.functional.cross_entropy(
        outputs.logits.detach().view(-1, V), labels
    ).requires_grad
    assert nn.functional.cross_entropy(outputs.logits.view(-1, V), labels).requires_grad


@pytest.mark.parametrize("ask", [lambda x: x.register_hook(print), lambda x: x.retain_grad()])
def test_the_gradient_of_a_fused_loss_to_the_logits_is_an_error(ask: Any) -> None:
    model = apply_patch(tiny_model(LLAMA))
    outputs = call(model, tiny_batch(model))
    ask(outputs.logits)
    with pytest.raises(RuntimeError, match="LIGER_PATCH_RETURN_LOGITS=1"):
        outputs.loss.backward()


@pytest.mark.parametrize("allow_unused", [None, True])
@pytest.mark.parametrize("read", [False, True])
def test_autograd_grad_of_a_fused_loss_by_the_logits_is_an_error(
    read: bool, allow_unused: bool | None
) -> None:
    model = apply_patch(tiny_model(LLAMA))
    outputs = call(model, tiny_batch(model))
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


def test_a_hook_that_is_removed_waits_for_nothing() -> None:
    model = apply_patch(tiny_model(LLAMA))
    outputs = call(model, tiny_batch(model))
    outputs.logits.register_hook(print).remove()
    outputs.logits[:, -1].retain_grad()  # of which no loss is computed
    outputs.loss.backward()


def test_logits_that_a_loss_does_not_depend_on_have_no_gradient() -> None:
    model = apply_patch(tiny_model(LLAMA))
    logits, other = call(model, tiny_batch(model)).logits, torch.ones(3, requires_grad=True)
    gradients = torch.autograd.grad(other.sum(), [other, logits], allow_unused=True)
    assert gradients[1] is None
    (zeros,) = torch.autograd.grad(other.sum(), [logits], materialize_grads=True)
    assert not zeros.any()


@pytest.mark.parametrize("copied", [False, True])
def test_a_part_of_the_gradient_to_the_logits_is_an_error(copied: bool) -> None:
    """What a fused loss, or a copy that was computed before, leaves out."""
    model = apply_patch(tiny_model(LLAMA))
    outputs = call(model, tiny_batch(model))
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


class Tripled(torch.autograd.Function):
    """Somebody's own function that writes to its input."""

    @staticmethod
    def forward(ctx, logits: Tensor) -> Tensor:
        ctx.mark_dirty(logits)
        return logits.mul_(3.0)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        return 3.0 * grad_output


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model_type)
def test_a_function_that_writes_to_logits_is_in_the_backward_pass(row: Any) -> None:
    model = tiny_model(row)
    batch = tiny_batch(model)

    def result() -> Step:
        logits = call(model, batch).logits
        written = Tripled.apply(logits)
        return gradients(model, written.square().sum() + logits[:, 1:].sum())

    eager = result()
    with patched(model, layers=False):
        torch.testing.assert_close(result(), eager)


def test_a_function_that_writes_to_a_view_of_logits_is_an_error() -> None:
    model = apply_patch(tiny_model(LLAMA))
    logits = call(model, tiny_batch(model)).logits
    with pytest.raises(RuntimeError, match="dirty"):
        Tripled.apply(logits[:, 1:])


def test_a_function_that_writes_to_logits_without_gradients_leaves_the_backward_pass() -> None:
    model = tiny_model(LLAMA)
    batch = tiny_batch(model)

    def result() -> Step:
        logits = call(model, batch).logits
        with torch.no_grad():
            Tripled.apply(logits)
        return gradients(model, logits.square().sum())

    eager = result()
    with patched(model, layers=False):
        torch.testing.assert_close(result(), eager)


def test_batched_upstream_gradients_are_an_error_that_names_them() -> None:
    model = apply_patch(tiny_model(LLAMA))
    loss = call(model, tiny_batch(model)).loss
    with pytest.raises(RuntimeError, match="is_grads_batched=True"):
        torch.autograd.grad(loss, list(model.parameters()), torch.ones(2), is_grads_batched=True)


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


@pytest.mark.parametrize("frozen", ["head", "backbone", "all"])
def test_gradients_exist_where_eagers_do(frozen: str) -> None:
    model = widened(tiny_model(LLAMA))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(
            frozen != "all" and name.startswith("lm_head") == (frozen != "head")
        )
    if frozen == "all":
        with patched(model):
            outputs = call(model, tiny_batch(model))
        assert not outputs.loss.requires_grad
        assert not outputs.logits.requires_grad
        return
    truth = step(model, tiny_batch(model))
    with patched(model):
        ours = step(model, tiny_batch(model))
        assert patch_status(model).fused
    assert {name for name, gradient in ours.items() if gradient is not None} > {"loss"}
    assert_no_worse(ours, truth, truth, torch.float32)


def test_a_scaled_loss_and_a_retained_graph_are_eagers() -> None:
    model = widened(tiny_model(LLAMA))
    results = []
    for patch in (False, True):
        if patch:
            apply_patch(model)
        model.zero_grad()
        loss = call(model, tiny_batch(model)).loss
        (loss * 3).backward(retain_graph=True)
        loss.backward()
        results.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert_no_worse(results[1], results[0], results[0], torch.float32)


def test_gradients_accumulate_over_two_calls() -> None:
    model = widened(tiny_model(LLAMA))
    results = []
    for patch in (False, True):
        if patch:
            apply_patch(model)
        model.zero_grad()
        outputs = [call(model, tiny_batch(model, seed=seed)) for seed in (0, 1)]
        with Float64():
            total = outputs[0].loss + 2 * outputs[1].loss
        total.backward()
        results.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert_no_worse(results[1], results[0], results[0], torch.float32)


def test_functional_transforms_give_eagers_gradients() -> None:
    model = tiny_model(LLAMA)
    batch = tiny_batch(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, kwargs=batch).loss

    eager = torch.func.grad(loss)(parameters)
    apply_patch(model)
    with pytest.warns(UserWarning, match="ordinary logits"):
        ours = torch.func.grad(loss)(parameters)
    for name, gradient in eager.items():
        torch.testing.assert_close(ours[name], gradient)


def test_functional_call_uses_the_given_parameters() -> None:
    model = tiny_model(LLAMA)
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


def test_hooks_that_offload_what_is_saved_read_no_logits() -> None:
    """Those in front of a softcap, which are saved."""
    model = apply_patch(tiny_model(GEMMA2))
    batch = tiny_batch(model)
    truth = gradients(model, model(**batch).loss)
    copied: list[Any] = []

    def copy(tensor: Tensor) -> Tensor:
        copied.append(tensor.shape)
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)

    with torch.autograd.graph.saved_tensors_hooks(copy, lambda tensor: tensor):
        loss = model(**batch).loss
    assert patch_status(model).fused
    assert copied
    assert not any(shape[-1:] == (V,) for shape in copied if len(shape) > 1)
    torch.testing.assert_close(gradients(model, loss), truth)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model_type)
def test_the_operations_of_a_fused_step_can_be_counted(row: registry.Architecture) -> None:
    """Those of eager but for the head's with tokens that nothing predicts."""
    model = tiny_model(row)
    batch = tiny_batch(model)
    batch["labels"] = batch["input_ids"]
    counts = []
    for patch in (False, True):
        if patch:
            apply_patch(model, layers=True)
        with FlopCounterMode(display=False) as counter:
            model(**batch).loss.backward()
        counts.append(counter.get_total_flops())
    assert patch_status(model).fused
    left_out = len(batch["labels"])  # a token of each row
    assert counts[0] - counts[1] == 3 * 2 * left_out * model.config.hidden_size * V > 0


def test_models_run_fused_where_hooks_of_saved_tensors_are_disabled() -> None:
    model = apply_patch(tiny_model(GEMMA2))
    batch = tiny_batch(model)
    truth = gradients(model, model(**batch).loss)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        loss = model(**batch).loss
    assert patch_status(model).fused
    torch.testing.assert_close(gradients(model, loss), truth)


def test_a_loss_that_is_kept_holds_no_logits_after_its_backward_pass() -> None:
    model = apply_patch(tiny_model(GEMMA2))
    gc.collect()
    before = held_logits()
    loss = Sum.apply(call(model, tiny_batch(model)).logits)
    loss.backward()
    assert held_logits() == before


def test_a_hook_that_waits_for_the_gradient_of_the_logits_is_an_error() -> None:
    """Also one that removes itself, or that uses what torch's own hooks are made of."""
    fn = torch.distributed.is_available

    def once(gradient: Tensor) -> None:
        handle.remove()
        fn()

    model = apply_patch(tiny_model(LLAMA))
    outputs = call(model, tiny_batch(model))
    handle = outputs.logits.register_hook(once)
    with pytest.raises(RuntimeError, match="no gradient with respect to them"):
        outputs.loss.backward()


def held_logits() -> int:
    return sum(type(each) is DeferredLogits and each.is_computed for each in gc.get_objects())
