"""Logits that have left a graph of torch.compile: as deferred as those that were never in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import pytest
import torch
from compiled_graphs import WARNINGS
from exactness import assert_no_worse
from slow_cases import slow_but
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from training_step import tell_apart
from transformers import PreTrainedModel

from liger_patch import apply_patch, registry
from liger_patch.deferred.traced import TRACES_LOGITS

ROWS = {row.model_type: row for row in registry.available()}
pytestmark = [
    *WARNINGS,
    pytest.mark.skipif(not TRACES_LOGITS, reason="needs torch 2.11: TRACES_LOGITS"),
]


class Compiled(NamedTuple):
    """A model, its first weights, and its call as one graph."""

    model: PreTrainedModel
    weights: dict[str, Tensor]
    call: Callable[..., Any]


def make_model(model_type: str) -> Any:
    """With one layer, for the sake of the compiler's time."""
    model = tiny_model(ROWS[model_type]).double()
    del model.model.layers[1:]
    return model


# Both compute with the logits; for gemma2, the compiler traces twice.
@pytest.fixture(scope="module", params=slow_but(["cohere"], ["cohere", "gemma2"]))
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    """One for all tests: its first call compiles."""
    torch._dynamo.reset()
    model = apply_patch(make_model(request.param))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    yield Compiled(model, weights, torch.compile(model, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()


@pytest.fixture
def model(compiled: Compiled) -> PreTrainedModel:
    compiled.model.load_state_dict(compiled.weights)
    compiled.model.zero_grad()
    return compiled.model


@pytest.fixture
def outputs(compiled: Compiled, model: PreTrainedModel) -> Any:
    return compiled.call(**tiny_batch(model, ignored=0.3))


def test_values_and_gradients(model: PreTrainedModel, outputs: Any) -> None:
    outputs.logits.square().mean().backward()
    uncompiled = apply_patch(make_model(model.config.model_type))
    uncompiled(**tiny_batch(model, ignored=0.3)).logits.square().mean().backward()
    ours, truth = ({n: p.grad for n, p in m.named_parameters()} for m in (model, uncompiled))
    truth, ours = tell_apart(truth, ours)
    assert_no_worse(ours, truth, truth, torch.float32)


@pytest.mark.parametrize("fused", [False, True])
def test_after_a_step_they_are_an_error(model: PreTrainedModel, outputs: Any, fused: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    outputs.loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="weight changed since the forward pass"):
        outputs.logits.sum()


def test_a_gradient_that_the_loss_leaves_out_is_an_error(outputs: Any) -> None:
    outputs.logits.retain_grad()
    with pytest.raises(RuntimeError, match=r"retain_grad of outputs\.logits"):
        outputs.loss.backward()


def test_the_gradient_of_another_loss(outputs: Any) -> None:
    outputs.logits.retain_grad()
    outputs.logits.sum().backward()
    assert torch.equal(outputs.logits.grad, torch.ones_like(outputs.logits))


def test_another_autograd_function(outputs: Any) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * 2

    with pytest.raises(RuntimeError, match=r"give it outputs\.logits\.clone\(\)"):
        cast(Tensor, Doubled.apply(outputs.logits)).sum().backward()
    cast(Tensor, Doubled.apply(outputs.logits.clone())).sum().backward()


def test_past_python_they_are_nan(outputs: Any) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        assert outputs.logits.isnan().all()
        assert outputs.logits.untyped_storage().nbytes() == 8


def test_a_write_between_two_graphs(model: PreTrainedModel, outputs: Any) -> None:
    """A later graph reads what was written, and its loss has the gradients of that."""
    labels = tiny_batch(model)["input_ids"].flatten()

    def loss_of(logits: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels)

    def run(model: Any, outputs: Any, function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        outputs.logits[..., 3] = -1e4
        outputs.logits[0, torch.tensor(1)].mul_(0.5)
        loss = function(outputs.logits)
        loss.backward()
        return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}

    found = run(model, outputs, torch.compile(loss_of, backend="eager"))
    uncompiled = apply_patch(make_model(model.config.model_type))
    truth = run(uncompiled, uncompiled(**tiny_batch(uncompiled, ignored=0.3)), loss_of)
    unchanged = loss_of(model(**tiny_batch(model)).logits)
    assert (truth["loss"] - unchanged).abs() > 0.01  # the write tells
    truth, found = tell_apart(truth, found)
    assert_no_worse(found, truth, truth, torch.float32)
