"""Heads of any kind: fused where they multiply by a plain weight, otherwise ordinary, and named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from tiny_models import VOCAB_SIZE as V
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune
from training_step import call, patched, step, widened
from transformers import PreTrainedModel
from unusual_heads import CastOutput, H, packed, sharded

from liger_patch import apply_patch, patch_status


def model_with(change: Callable[[nn.Linear], nn.Module | None]) -> PreTrainedModel:
    """A float64 model whose head was changed in place, or is what ``change`` returns."""
    model = widened(tiny_model())
    torch.manual_seed(1)
    changed = change(model.lm_head)
    if changed is not None:
        model.lm_head = changed.double()
    return model


def assert_falls_back(model: PreTrainedModel, *reasons: str) -> None:
    """With one warning, which names the head, or an error where fusing is demanded; loss, gradients
    and logits are eager's.
    """
    batch = tiny_batch(model)
    truth, logits = step(model, batch), call(model, batch).logits
    with patched(model):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = step(model, batch)
            again = step(model, batch)
            assert torch.equal(call(model, batch).logits, logits)
        (message,) = [str(w.message) for w in caught if "liger_patch" in str(w.message)]
        assert patch_status(model).fused is False
        assert patch_status(model).reason in message
        with pytest.MonkeyPatch.context() as patches:
            patches.setenv("LIGER_PATCH_RETURN_LOGITS", "0")
            with pytest.raises(RuntimeError, match="RETURN_LOGITS=0 demands") as error:
                call(model, batch)
            assert "forward" not in vars(model.lm_head)
            assert "_loss_function" not in vars(model)
    for reason in (type(model.lm_head).__name__, *reasons):
        assert reason in message
        assert reason in str(error.value)
    assert_no_worse(ours, truth, truth, torch.float32)
    assert_no_worse(again, truth, truth, torch.float32)


def assert_fused(model: PreTrainedModel) -> None:
    batch = tiny_batch(model)
    truth = step(model, batch)
    with patched(model):
        ours = step(model, batch)
        assert (patch_status(model).fused, patch_status(model).reason) == (True, None)
    assert_no_worse(ours, truth, truth, torch.float32)


class Rectified(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def of_class(cls: type[nn.Linear]) -> Callable[[nn.Linear], None]:
    return lambda head: setattr(head, "__class__", cls)


def hook(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Linear], None]:
    def hooked(head: nn.Linear) -> None:
        head.register_forward_hook(lambda head, args, logits: change(logits))

    return hooked


def written_to(logits: Tensor) -> Tensor:
    logits[..., :5] = -3.0
    return logits


READ = "the logits of the head (torch.nn.modules.linear.Linear) were read by "
FALL_BACK: dict[str, tuple[Callable[[nn.Linear], nn.Module | None], tuple[str, ...]]] = {
    "cast": (CastOutput, ()),
    "sharded": (sharded, ("weight of type Sharded", "logits of type Sharded")),
    "packed": (packed, (") computes its logits itself",)),
    "relu": (of_class(Rectified), ("reads its logits itself, by relu before the loss",)),
    "hook that reads": (hook(lambda logits: logits + logits.softmax(-1)), (READ,)),
    "hook that writes": (hook(written_to), (READ,)),
}


@pytest.mark.parametrize("name", FALL_BACK)
def test_a_head_that_computes_in_its_own_way_falls_back(name: str) -> None:
    change, reasons = FALL_BACK[name]
    assert_falls_back(model_with(change), *reasons)


def test_a_head_that_torch_jit_has_compiled_falls_back() -> None:
    model = model_with(lambda _: None)
    batch = tiny_batch(model)
    truth = step(model, batch)
    apply_patch(model)
    model.lm_head = torch.jit.script(model.lm_head)
    with pytest.warns(UserWarning, match="torch.jit has compiled the head"):
        assert_no_worse(step(model, batch), truth, truth, torch.float32)


class OnlyWeight(nn.Module):
    """Without the numbers of features that ``nn.Linear`` has."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        return nn.functional.linear(hidden_states, self.weight)


def pruned(head: nn.Linear) -> None:
    prune.l1_unstructured(head, "weight", amount=0.3)


def dropout_in_a_hook(head: nn.Linear) -> None:
    head.register_forward_pre_hook(lambda head, args: nn.functional.dropout(args[0], 0.5))


@pytest.mark.parametrize(
    "change",
    [
        OnlyWeight,
        pruned,
        dropout_in_a_hook,
        checkpoint_wrapper,
    ],
)
def test_a_head_that_multiplies_by_a_plain_weight_is_fused(change: Callable) -> None:
    assert_fused(model_with(change))


@pytest.mark.parametrize("model_type", ["gemma2", "llama"])
def test_a_hook_that_scales_the_logits_is_fused(model_type: str) -> None:
    model = widened(tiny_model(model_type))
    model.lm_head.register_forward_hook(lambda head, args, logits: logits * 0.5)
    assert_fused(model)


def of_all_modules(head: nn.Module, hook: Callable) -> Any:
    def of_head(module: nn.Module, *gradients: Any) -> Any:
        return hook(module, *gradients) if module is head else None

    return nn.modules.module.register_module_full_backward_hook(of_head)


# what torch says of hooks on embeddings, on output classes and of the deprecated kind
@pytest.mark.filterwarnings("ignore:Full backward hook is firing when:UserWarning")
@pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning")
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize(
    "register",
    [
        nn.Module.register_full_backward_hook,
        nn.Module.register_full_backward_pre_hook,
        nn.Module.register_backward_hook,
        of_all_modules,
    ],
)
def test_backward_hooks_see_eagers_gradient_of_the_logits_but_for_evaluation(
    register: Callable, request: pytest.FixtureRequest
) -> None:
    model = widened(tiny_model())
    seen: list[Tensor] = []
    handle = register(model.lm_head, lambda head, *grads: seen.append(grads[-1][0].clone()))
    request.addfinalizer(handle.remove)
    assert_falls_back(model, "backward hooks of the head")
    eager, *ours = seen
    assert eager.shape == (2, 9, V)
    assert len(ours) == 2
    for gradient in ours:
        torch.testing.assert_close(gradient, eager)
    apply_patch(model)
    with torch.no_grad():
        assert not call(model, tiny_batch(model)).logits.is_computed
    assert patch_status(model).fused
    assert len(seen) == 3


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when:UserWarning")
def test_a_backward_hook_of_the_model_leaves_the_logits_to_be_read() -> None:
    results = []
    for model in (widened(tiny_model()), apply_patch(widened(tiny_model()))):
        calls: list[Any] = []
        model.register_full_backward_hook(lambda *gradients, calls=calls: calls.append(gradients))
        loss, logits = call(model, tiny_batch(model), return_dict=False)[:2]
        (loss + logits.square().mean()).backward()
        assert len(calls) == 1
        results.append([loss.detach(), logits.detach(), model.lm_head.weight.grad])
    torch.testing.assert_close(results[1], results[0])
    assert patch_status(model).fused


def test_hooks_of_the_heads_weight_see_its_whole_gradient_once() -> None:
    model = widened(tiny_model())
    seen: list[Tensor] = []
    weight = model.lm_head.weight
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    assert_fused(model)
    assert len(seen) == 4
    torch.testing.assert_close(seen[2:], seen[:2])


def test_an_optimizer_that_steps_within_the_backward_pass_trains_as_eager() -> None:
    def descend(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    results = []
    for model in (widened(tiny_model()), apply_patch(widened(tiny_model()))):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(descend)
        for seed in (0, 1):
            call(model, tiny_batch(model, seed=seed)).loss.backward()
        results.append(dict(model.named_parameters()))
    assert patch_status(model).fused
    assert_no_worse(results[1], results[0], results[0], torch.float32)


class Adapted(nn.Linear):
    """A head with an adapter beside it, put together in different ways."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(H, V, bias=False)
        self.a, self.b = nn.Parameter(torch.randn(4, H) / 4), nn.Parameter(torch.randn(V, 4) / 2)
        self.how = how

    def base(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def adapter(self, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.a), self.b)

    def forward(self, input: Tensor) -> Tensor:
        return self.how(self, input)


def without_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad():
        return function(x)


def doubled_before(head: Any, x: Tensor, *, first: bool) -> Tensor:
    adapter = head.adapter(x)
    adapter.mul_(2.0)
    return adapter + head.base(x) if first else head.base(x) + adapter


FUSED_SUMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": lambda head, x: head.base(x) + head.adapter(x),
    "reversed": lambda head, x: head.adapter(x) + head.base(x),
    "scaled": lambda head, x: 0.5 * (head.base(x) + head.adapter(x) * -2.0),
    "scaled by a tensor": lambda head, x: head.base(x) + head.adapter(x) * torch.tensor(0.3),
    "nested": lambda head, x: head.adapter(x) + (head.adapter(x) * 0.3 + head.base(x)),
    "of the head twice": lambda head, x: head.base(x) + head.base(x / 2),
}
OTHER_SUMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "detached base": lambda head, x: head.base(x).detach() + head.adapter(x),
    "detached adapter": lambda head, x: head.base(x) + head.adapter(x).detach(),
    "base without a gradient": lambda head, x: without_gradient(head.base, x) + head.adapter(x),
    "written to, first": lambda head, x: doubled_before(head, x, first=True),
    "written to, second": lambda head, x: doubled_before(head, x, first=False),
    "capped adapter": lambda head, x: head.base(x) + head.adapter(x).tanh(),
    "trained scale": lambda head, x: head.base(x) + head.adapter(x) * head.a.mean(),
    "alpha": lambda head, x: torch.add(head.base(x), head.adapter(x), alpha=2),
    "in place": lambda head, x: head.base(x).add_(head.adapter(x)),
}


@pytest.mark.parametrize("name", FUSED_SUMS)
def test_a_sum_of_products_is_fused(name: str) -> None:
    assert_fused(model_with(lambda head: Adapted(FUSED_SUMS[name])))


@pytest.mark.parametrize("name", OTHER_SUMS)
def test_a_sum_that_is_more_than_products_falls_back(name: str) -> None:
    assert_falls_back(model_with(lambda head: Adapted(OTHER_SUMS[name])))


@pytest.mark.parametrize("cast", [False, True])
def test_a_sum_that_keeps_float32_falls_back(cast: bool) -> None:
    """The product of 16-bit factors would lose what the adapter's float32 keeps."""

    def how(head: Any, x: Tensor) -> Tensor:
        adapter = nn.functional.linear(nn.functional.linear(x.float(), head.a), head.b)
        logits = head.base(x) + adapter
        return logits.to(x.dtype) if cast else logits

    model = tiny_model(dtype=torch.bfloat16)
    head = Adapted(how)
    head.weight = model.lm_head.weight
    model.lm_head = head
    batch = tiny_batch(model)
    eager = step(model, batch)
    with patched(model, layers=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = step(model, batch)
        assert patch_status(model).fused is cast
    torch.testing.assert_close(ours["loss"], eager["loss"], rtol=2e-2 if cast else 1e-6, atol=0)


def test_an_adapter_whose_weight_is_freed_after_its_call_falls_back() -> None:
    """As FSDP does with layers that it wraps on their own."""

    def how(head: Any, x: Tensor) -> Tensor:
        logits, b = head.base(x), head.b.detach().clone()
        logits = logits + nn.functional.linear(nn.functional.linear(x, head.a), b)
        b.zero_()
        return logits

    model = model_with(lambda head: Adapted(how))
    batch = tiny_batch(model)
    with torch.no_grad():
        eager = call(model, batch).loss
        with patched(model), pytest.warns(UserWarning, match="Adapted"):
            ours = call(model, batch).loss
    torch.testing.assert_close(ours, eager)
