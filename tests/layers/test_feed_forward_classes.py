"""Gated feed-forward layers of Transformers' own classes: which have a kernel, and that results and
every gradient are no worse than the class's own against float64, in 16 bits and in 32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer_checks import check
from tiny_models import ROWS, tiny_batch, tiny_model
from torch import Tensor, nn
from transformers.activations import ACT2FN

from liger_patch import apply_patch
from liger_patch.layers import mlp
from liger_patch.layers.checks import LAYER_NAMES, layers_of
from liger_patch.layers.mlp import mlp_class
from liger_patch.layers.replace import count_layers

HIDDEN, SIZE = 24, 40
CONFIGURATION = {  # every field that a class reads
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": SIZE,
    "mlp_bias": False,
    "shared_intermediate_size": SIZE,
}
FOLDERS = {
    "BeamMLP": "beam",
    "GraniteMoeHybridMLP": "granitemoehybrid",
    "GraniteMoeSharedMLP": "granitemoeshared",
    "PixtralMLP": "pixtral",
}


def own_layer(name: str) -> Any:
    folder = FOLDERS[name]
    module = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    layer = getattr(module, name)(SimpleNamespace(**CONFIGURATION)).train()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def on_kernels(layer: Any) -> Any:
    replacement = mlp_class(layer)
    assert LAYER_NAMES in vars(replacement)
    replaced = copy.copy(layer)
    replaced.__class__ = replacement
    return replaced


def hold_to_the_rule(layer: Any, dtype: torch.dtype) -> None:
    inputs = {name: value.detach().to(dtype) for name, value in layer.named_parameters()}
    inputs = {name.replace(".", "__"): value for name, value in inputs.items()}
    inputs["x"] = torch.randn(2, 5, HIDDEN).to(dtype)

    def result(module: Any, x: Tensor, **weights: Tensor) -> Tensor:
        named = {name.replace("__", "."): value for name, value in weights.items()}
        return torch.func.functional_call(module, named, (x,))

    replaced = on_kernels(layer)
    check(lambda **t: result(replaced, **t), lambda **t: result(layer, **t), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FOLDERS)
def test_layers_compute_what_their_class_does(name: str, dtype: torch.dtype) -> None:
    hold_to_the_rule(own_layer(name), dtype)


def make_model(model_type: str = "llama") -> Any:
    return tiny_model(ROWS[model_type])


ACTIVATIONS = ["silu", "swish", "gelu_pytorch_tanh", "gelu_new", "gelu", "quick_gelu", "relu"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_that_have_a_kernel(activation: str) -> None:
    model = make_model()
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
    model = apply_patch(make_model(), layers=True)
    activation, calls = type(model.model.layers[0].mlp.act_fn), []
    monkeypatch.setattr(activation, "forward", lambda self, x: calls.append(1) or x)
    model(**tiny_batch(model))
    assert len(calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("model_type", "name"), [("llama", "act_fn"), ("phi3", "activation_fn")])
def test_hooks_of_an_activation_run(when: str, model_type: str, name: str) -> None:
    model, calls = make_model(model_type), []
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
    model, batch = make_model(model_type), tiny_batch(make_model(model_type))
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
    model = make_model()
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


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "phi3"])
def test_layers_of_one_configuration_are_probed_once(
    model_type: str, adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, probes = make_model(model_type), []
    if adapters:
        peft = pytest.importorskip("peft")
        peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules="all-linear"), model)
    real = mlp.results_match
    monkeypatch.setattr(mlp, "results_match", lambda *ways: probes.append(1) or real(*ways))
    for number in (1, 2):  # a second patch tries again: a class may compute something else by then
        assert count_layers(apply_patch(model, layers=True))["gated"] == 2
        assert len(probes) == number


def test_a_layer_whose_activation_is_configured_otherwise_is_probed_for_itself() -> None:
    model = make_model("gemma2")
    model.model.layers[1].mlp.act_fn.act = nn.functional.relu
    assert count_layers(apply_patch(model, layers=True))["gated"] == 1


def test_a_sparse_gate_is_left_to_the_model() -> None:
    model = make_model("gemma3n_text")
    model.model.layers[0].mlp.activation_sparsity = 0.95
    with torch.device("meta"):  # the others are tried on the CPU
        apply_patch(model, layers=True)
    assert count_layers(model)["gated"] == len(model.model.layers) - 1


def test_a_patch_calls_no_hook_and_draws_no_random_number() -> None:
    model, calls = make_model(), []
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

    model = make_model()
    model.model.layers[0].mlp.act_fn = SiLU()
    batch = tiny_batch(model)
    truth = model(**batch).loss
    assert count_layers(apply_patch(model, layers=True))["gated"] == 1
    torch.testing.assert_close(model(**batch).loss, truth)
