"""Layers that run again for the input of the next one: what they are given, and when they are not
asked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from offloaded_models import KINDS, MARKS, assert_same_bits, gradients, model_of, offloaded
from offloaded_models import tiny_batch_of as batch_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_patch import apply_patch
from liger_patch.patch.layer_again import LayerCall
from liger_patch.patch.offload import FUNCTION, CheckpointOffload

pytestmark = MARKS


class Layer(GradientCheckpointingLayer):
    """A checkpointed layer of one function."""

    gradient_checkpointing = True

    def __init__(self, function: Callable[..., Any], checkpointed: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        setattr(self, FUNCTION, checkpointed)

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def model_of_layers(
    functions: list[Callable[..., Any]], checkpointed: Any
) -> tuple[nn.ModuleList, Tensor]:
    """Return layers, and what the first one takes."""
    layers = nn.ModuleList([Layer(function, checkpointed) for function in functions])
    return layers, torch.linspace(-1, 1, 8).requires_grad_() * 1


def overwriting(x: Tensor) -> Tensor:
    y = x.sin()
    x.mul_(2)
    return y


@KINDS
@pytest.mark.parametrize("every", [2, 3, 9])
def test_as_many_inputs_at_once(
    monkeypatch: pytest.MonkeyPatch, every: int, reentrant: bool
) -> None:
    """The one that is kept, and those computed from it. A graph that is retained holds no more."""
    computed: list[weakref.ref[Any]] = []
    alive = []
    again = LayerCall.again

    def counting(call: LayerCall) -> Tensor:
        result = again(call)
        computed.append(weakref.ref(result.untyped_storage()))
        alive.append(sum(each() is not None for each in computed))
        return result

    monkeypatch.setattr(LayerCall, "again", counting)
    offloaded(model := model_of(reentrant, num_hidden_layers=6), every=every)
    model(**batch_of(model), use_cache=False).loss.backward(retain_graph=True)
    assert max(alive) == min(every, 6) - 1
    assert len(computed) == 6 - -(-6 // every)
    assert all(each() is None for each in computed)


@pytest.mark.filterwarnings("ignore:liger_patch computes no layer input again")
@pytest.mark.parametrize("every", [2, 3])
def test_a_function_that_saves_another_tensor_first(every: int) -> None:
    """Only the hidden states are computed again: this function saves what its layer computes."""
    layers, x = model_of_layers([lambda x: (x + 1).sin()] * 4, lambda layer, *args: layer(*args))
    (expected,) = torch.autograd.grad(nn.Sequential(*layers)(x).sum(), x)
    offload = CheckpointOffload(("cpu",), min_bytes=1, every=every)
    with offload.forward_pass(layers):
        h = x
        for layer in layers:
            h = layer(h)
    (found,) = torch.autograd.grad(h.sum(), x)
    assert torch.equal(found, expected)


@KINDS
@pytest.mark.parametrize(
    ("function", "call"),
    [
        (lambda x, y: x.sin() * y, lambda layer, x: layer(x, x)),
        (lambda x: (x.sin(), x.cos()), lambda layer, x: layer(x)[0]),
    ],
    ids=["given twice", "tuples"],
)
def test_layers_of_other_arguments_and_results(
    reentrant: bool, function: Callable[..., Any], call: Callable[..., Tensor]
) -> None:
    found = []
    for every in (1, 2, 3):
        layers, x = model_of_layers([function] * 5, partial(checkpoint, use_reentrant=reentrant))
        offload = CheckpointOffload(("cpu",), min_bytes=1, every=every)
        x.retain_grad()
        with offload.forward_pass(layers):
            h = x
            for layer in layers:
                h = call(layer, h)
        h.sum().backward()
        found.append(x.grad)
        again = 5 - -(-5 // every)
        assert ("again" not in str(offload)) if every == 1 else f"{again} computed" in str(offload)
    assert all(torch.equal(each, found[0]) for each in found[1:])


@pytest.mark.parametrize("every", [1, 3])
def test_a_layer_that_overwrites_its_input(every: int) -> None:
    """It never runs again for its result. Its own input, computed again, is as it was."""
    layers, x = model_of_layers(
        [torch.sin, overwriting, torch.sin, torch.sin], partial(checkpoint, use_reentrant=False)
    )
    (expected,) = torch.autograd.grad(x.sin().sin().sin().sin().sum(), x)
    offload = CheckpointOffload(("cpu",), min_bytes=1, every=every)
    with offload.forward_pass(layers):
        h = x
        for layer in layers:
            h = layer(h)
    if every == 1:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(h.sum(), x)
    else:
        assert torch.equal(torch.autograd.grad(h.sum(), x)[0], expected)
        assert str(offload).endswith("2 computed again")


@pytest.mark.parametrize("count", [2, 6], ids=["on the device", "on the host"])
def test_an_input_that_was_modified_gives_no_other(count: int) -> None:
    layers, x = model_of_layers([torch.sin] * count, partial(checkpoint, use_reentrant=False))
    offload = CheckpointOffload(("cpu",), min_bytes=1, every=2)
    with offload.forward_pass(layers):
        first = h = layers[0](x)
        x.mul_(2)
        for layer in layers[1:]:
            h = layer(h)
    assert f"{count // 2} computed again" in str(offload)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(h.sum(), first)


@KINDS
@pytest.mark.parametrize("autocast", [False, True])
def test_a_backward_pass_behind_a_forward_pass_under_autocast(
    autocast: bool, reentrant: bool
) -> None:
    """Layers run again under the autocast of their forward pass, also outside it, as in Trainer.
    Weights that were cast for the result of a layer are not those of its backward pass.
    """
    found = []
    for is_offloaded in (False, True):
        model = apply_patch(model_of(reentrant, num_hidden_layers=4))
        if is_offloaded:
            offloaded(model, every=2)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch_of(model), use_cache=False).loss
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss.backward()
        found.append(gradients(model))
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("every", [2, 9])
def test_frozen_layers_run_once(every: int) -> None:
    """The first layer that trains finds its input."""
    found, calls = [], [0] * 6
    for is_offloaded in (False, True):
        model = model_of(None, num_hidden_layers=6)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()  # both versions of Transformers enable them
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.3" in name or "layers.5" in name)
        apply_patch(model, layers=False)
        if is_offloaded:
            offloaded(model, every=every, layers=False)
        calls = [0] * 6

        def count(*_: Any, i: int, calls: list[int] = calls) -> None:
            calls[i] += 1

        for i, layer in enumerate(model.model.layers):
            layer.mlp.gate_proj.register_forward_pre_hook(partial(count, i=i))
        torch.manual_seed(0)
        model(**batch_of(model), use_cache=False).loss.backward()
        found.append(gradients(model))
    assert_same_bits(found[1], found[0])
    assert calls[:3] == [1, 1, 1]
    assert calls[3] == 3
