"""What make_fx and torch.export record of the losses, and FakeTensorMode runs of them. The truth is
the same call outside of a graph.
"""

import gc
from typing import Any

import pytest
import torch
from compiled_graphs import MARKS
from exactness import assert_no_worse
from loss_calls import (
    LOSSES,
    MANY,
    NAMES,
    Loss,
    assert_same,
    frozen,
    inputs,
    mean,
    ready_made,
    with_gradients,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

from liger_patch import linear_cross_entropy, linear_distillation, linear_log_probs

pytestmark = MARKS


def test_without_gradients_no_gradient_is_computed():
    given = inputs()
    with torch.no_grad():
        loss, *gradients = _call_as_recorded(*given)
    assert not any(gradient.numel() for gradient in gradients)
    torch.testing.assert_close(loss, linear_cross_entropy(*given).detach())


def _call_as_recorded(*given: Tensor) -> tuple[Tensor, ...]:
    """Call the operator as a graph of these inputs does."""
    graph = make_fx(lambda *given: linear_cross_entropy(*given))(*given)
    (node,) = (n for n in graph.graph.nodes if "linear_cross_entropy" in str(n.target))
    places = [n for n in graph.graph.nodes if n.op == "placeholder"]
    args = [given[places.index(a)] if isinstance(a, torch.fx.Node) else a for a in node.args]
    return torch.ops.liger_patch.linear_cross_entropy(*args, **node.kwargs)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_step_is_not_differentiated_again(loss, name):
    """Its gradients depend on the inputs, also where the forward pass computed them."""
    given = inputs()
    leaf = given[NAMES.index(name)]

    def gradient(*given: Tensor) -> Tensor:
        inner = given[NAMES.index(name)]
        return torch.autograd.grad(loss(*given).square() + inner.square().sum(), inner)[0]

    recorded = make_fx(gradient)(*given)(*given)
    torch.testing.assert_close(recorded, gradient(*given))
    if loss is frozen and name == "weight":  # which is detached from the operator
        return
    with pytest.raises(RuntimeError, match=r"no autograd formula|differentiated again"):
        torch.autograd.grad(recorded.sum(), leaf)


@pytest.mark.parametrize("end", ["dropped", "trained", "kept for another backward pass"])
def test_gradients_live_as_long_as_the_graph_of_their_call(end):
    given = inputs()
    loss, *gradients = _call_as_recorded(*given)
    stored = StorageWeakRef(gradients[1].untyped_storage())
    assert gradients[1].shape == given[1].shape
    del gradients
    if end != "dropped":
        loss.backward(retain_graph=end != "trained")
    del loss
    gc.collect()
    assert stored.expired()


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("loss", MANY)
def test_make_fx_sees_the_operator(loss, mode):
    def step(*given: Tensor) -> tuple[Tensor, ...]:
        value = loss(*given)
        return value, *torch.autograd.grad(value, given[:2])

    graph = make_fx(step, tracing_mode=mode)(*inputs())
    other = inputs(ignored=0.8)
    ours = dict(zip(("loss", *NAMES), graph(*other), strict=True))
    ours["loss"] = ours["loss"].detach()
    assert_same(ours, loss, *other)
    assert any("liger_patch" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.parametrize("loss", LOSSES)
def test_results_without_values_have_the_shapes_of_those_with(loss):
    given = inputs()
    truth = with_gradients(loss, *given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = with_gradients(loss, *(mode.from_tensor(each) for each in given))
    for name, expected in truth.items():
        assert (fake[name].shape, fake[name].dtype) == (expected.shape, expected.dtype)


def log_probs(*given: Tensor) -> Tensor:
    return linear_log_probs(*given).log_probs.mean()


def on_hopper(*given: Tensor) -> Tensor:
    return linear_cross_entropy(*given, hopper_kernels=True)


def distillation(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_distillation(hidden_states, weight, hidden_states, weight, labels)


@pytest.mark.parametrize("loss", [log_probs, on_hopper, distillation])
def test_a_recording_would_hold_the_number_of_supervised_tokens(loss):
    with pytest.raises(RuntimeError, match="reads the number of supervised tokens"):
        make_fx(loss)(*inputs())
    given = inputs()
    assert_same(with_gradients(torch.compile(loss, backend="eager"), *given), loss, *given)


class Model(nn.Module):
    def __init__(self, weight: Tensor, loss: Loss) -> None:
        super().__init__()
        self.weight, self.loss = nn.Parameter(weight.detach().clone()), loss

    def forward(self, hidden_states: Tensor, labels: Tensor) -> Tensor:
        return self.loss(hidden_states, self.weight, labels)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("loss", [mean, ready_made])
def test_what_is_exported_trains(loss, strict):
    hidden_states, weight, labels = inputs()
    tokens = torch.export.Dim("tokens")
    program = torch.export.export(
        Model(weight, loss),
        (hidden_states.detach(), labels),
        dynamic_shapes={"hidden_states": {0: tokens}, "labels": {0: tokens}},
        strict=strict,
    )
    hidden_states, _, labels = inputs(20, ignored=0.5)
    model: Any = program.module()
    value = model(hidden_states.detach(), labels)
    value.backward()
    (trained,) = model.parameters()
    truth = with_gradients(loss, hidden_states, weight, labels)
    truth.pop("hidden_states")
    assert_no_worse({"loss": value.detach(), "weight": trained.grad}, truth, truth, torch.float32)
