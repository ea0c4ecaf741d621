"""Gated feed-forward layers of Transformers' own classes: which have a kernel, and that results and
every gradient are no worse than the class's own against float64, in 16 bits and in 32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from transformers.activations import ACT2FN

from liger_patch import apply_patch
from liger_patch.layers import mlp
from liger_patch.layers.checks import layers_of
from liger_patch.layers.replace import count_layers

HIDDEN, SIZE = 24, 40


ACTIVATIONS = ["silu", "swish", "gelu_pytorch_tanh", "gelu_new", "gelu", "quick_gelu", "relu"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_that_have_a_kernel(activation: str) -> None:
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp.act_fn = ACT2FN[activation]
    batch = tiny_batch(model)
    truth = model(**batch).loss
    has_none = activation in ("quick_gelu", "relu")
    if has_none:
        with pytest.raises(ValueError, match=r"no gated layer .* activation of gated"):
            apply_patch(model, layers=["gated"])
    counts = count_layers(apply_patch(model, layers=True))
    assert counts["gated"] == (0 if has_none else 2)
    torch.testing.assert_close(model(**batch).loss, truth)


def test_an_activation_that_was_replaced_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply_patch(tiny_model(), layers=True)
    activation, calls = type(model.model.layers[0].mlp.act_fn), []
    monkeypatch.setattr(activation, "forward", lambda self, x: calls.append(1) or x)
    model(**tiny_batch(model))
    assert len(calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("model_type", "name"), [("llama", "act_fn"), ("phi3", "activation_fn")])
def test_hooks_of_an_activation_run(when: str, model_type: str, name: str) -> None:
    model, calls = tiny_model(model_type), []
    if when == "after":
        apply_patch(model, layers=True)
    activation = getattr(model.model.layers[0].mlp, name)
    activation.register_forward_hook(lambda *_: calls.append(1))
    if when == "before":
        apply_patch(model, layers=True)
    model(**tiny_batch(model))
    assert calls == [1]


class Partitioned(dict):
    """The parameters of a module under ZeRO-3, whose hooks gather them for the module's forward."""

    is_gathered = False

    def __getitem__(self, name: str) -> Any:
        assert self.is_gathered, f"{name} would be gathered once more"
        return super().__getitem__(name)


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_hooks_that_gather_parameters_do_nothing_for_an_activation(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO-3 hooks every module."""

    def hook(module: nn.Module, *_: Any) -> None:
        parameters: Any = module._parameters
        parameters.is_gathered = not parameters.is_gathered

    hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    model, batch = tiny_model(model_type), tiny_batch(tiny_model(model_type))
    truth = model(**batch).loss
    layers = [m for m in apply_patch(model).modules() if "gated" in layers_of(m)]
    for module in (each for layer in layers for each in layer.modules()):
        vars(module)["_parameters"] = Partitioned(module._parameters)
        module.register_forward_pre_hook(hook)
        module.register_forward_hook(hook)
    calls, gated = [], mlp.run_gated
    monkeypatch.setattr(mlp, "run_gated", lambda *a, **o: calls.append(1) or gated(*a, **o))
    torch.testing.assert_close(model(**batch).loss, truth)
    assert len(calls) == len(layers) > 0


def swapped(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def another_product(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + 1))


@pytest.mark.parametrize("forward", [swapped, another_product])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_layer_that_computes_something_else_is_left_alone(
    hooked: bool, forward: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another version of Transformers might, of the same names."""
    if hooked:  # of all modules: then the layers that are replaced take the model's own way
        hooks = nn.modules.module._global_forward_hooks
        monkeypatch.setitem(hooks, -1, lambda *_: None)
    model = tiny_model()
    layer = type(model.model.layers[0].mlp)
    monkeypatch.setattr(forward, "__module__", layer.forward.__module__)
    monkeypatch.setattr(layer, "forward", forward)
    counts = {
        "rms_norm": 5,
        "rotary": 2,
        "attention": 2,
        "gated": 0,
        "experts": 0,
        "recurrent": 0,
        "delta_net": 0,
        "lora": 0,
    }
    assert count_layers(apply_patch(model, layers=True)) == counts


def test_a_layer_whose_activation_is_configured_otherwise_is_probed_for_itself() -> None:
    model = tiny_model("gemma2")
    model.model.layers[1].mlp.act_fn.act = nn.functional.relu
    assert count_layers(apply_patch(model, layers=True))["gated"] == 1


def test_a_sparse_gate_is_left_to_the_model() -> None:
    model = tiny_model("gemma3n_text")
    model.model.layers[0].mlp.activation_sparsity = 0.95
    with torch.device("meta"):  # the others are tried on the CPU
        apply_patch(model, layers=True)
    assert count_layers(model)["gated"] == len(model.model.layers) - 1


def test_a_patch_calls_no_hook_and_draws_no_random_number() -> None:
    model, calls = tiny_model(), []
    layer = model.model.layers[0].mlp
    for module in (layer, *layer.children()):
        module.register_forward_hook(lambda *_: calls.append(1))
    hook = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    try:
        apply_patch(model, layers=True)
    finally:
        hook.remove()
    assert torch.rand(()) == expected
    assert count_layers(model)["gated"] == 2
    assert not calls


def test_an_activation_of_another_class_is_left_alone() -> None:
    class SiLU(torch.nn.SiLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = tiny_model()
    model.model.layers[0].mlp.act_fn = SiLU()
    batch = tiny_batch(model)
    truth = model(**batch).loss
    assert count_layers(apply_patch(model, layers=True))["gated"] == 1
    torch.testing.assert_close(model(**batch).loss, truth)
