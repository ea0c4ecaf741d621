"""Feed-forward layers on kernels: which have one, one function where their projections are plain,
and the modules' own calls wherever something else hangs on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_checks import as_of
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import Products, assert_same_step, step
from transformers.activations import ACT2FN

from liger_patch import apply_patch, revert_patch
from liger_patch.layers import mlp
from liger_patch.layers.checks import layers_of
from liger_patch.layers.replace import count_layers


@pytest.fixture
def calls(record: Callable[..., list[Any]]) -> list[Any]:
    """One entry for each feed-forward layer that ran as one function."""
    return record(mlp, "run_gated_mlp")


def other_product(ran: list[int], patch: pytest.MonkeyPatch) -> None:
    own = nn.functional.linear
    patch.setattr(nn.functional, "linear", lambda *args: ran.append(1) or own(*args))


def other_forward(ran: list[int], patch: pytest.MonkeyPatch) -> None:
    own = nn.Linear.forward
    patch.setattr(nn.Linear, "forward", lambda self, x: ran.append(1) or own(self, x))


def hook_of_all_modules(ran: list[int], patch: pytest.MonkeyPatch) -> None:
    hooks = nn.modules.module._global_forward_hooks
    patch.setitem(hooks, -1, lambda module, *_: ran.extend([1] * (type(module) is nn.Linear)))


@pytest.mark.parametrize("change", [other_product, other_forward, hook_of_all_modules])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_somebody_has_changed_of_all_products_runs(
    when: str, change: Callable[..., None], calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ran = tiny_model(), []
    if when == "after":
        apply_patch(model, layers=True)
    change(ran, monkeypatch)
    if when == "before":
        apply_patch(model, layers=True)
        ran.clear()
    model.model(**{name: v for name, v in tiny_batch(model).items() if name != "labels"})
    assert len(ran) == 7 * model.config.num_hidden_layers
    assert not calls


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_no_more_products_than_eager(reentrant: bool) -> None:
    """It stops where everything is there again that was kept: in front of the last product."""
    products = []
    for layers in (False, True):
        model = apply_patch(tiny_model().train(), layers=layers)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with Products() as counted:
            model(**tiny_batch(model)).loss.backward()
        products.append(counted.number)
    eager, ours = products
    assert eager > 0
    blind = torch.__version__.startswith("2.6") and not reentrant  # it does not tell of hooks
    assert ours <= eager + (model.config.num_hidden_layers if blind else 0)


def test_without_a_backward_pass_autocast_holds_the_weights_it_has_cast(calls: list[Any]) -> None:
    model = apply_patch(tiny_model(), layers=True).eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(**tiny_batch(model))
    assert not calls


def hooked(name: str, register: str) -> Callable[[nn.Module, list[int]], Any]:
    def hang(layer: Any, ran: list[int]) -> None:
        getattr(getattr(layer, name), register)(lambda *_: ran.append(1))

    return hang


def biased(layer: Any, ran: list[int]) -> None:
    layer.up_proj.bias = nn.Parameter(torch.ones(layer.up_proj.out_features))
    layer.up_proj.bias.register_hook(lambda gradient: ran.append(1))


def subclassed(name: str) -> Callable[[Any, list[int]], Any]:
    def hang(layer: Any, ran: list[int]) -> None:
        own = type(getattr(layer, name))

        def forward(self: Any, x: Tensor) -> Tensor:
            ran.append(1)
            return 2 * own.forward(self, x)

        getattr(layer, name).__class__ = type(own.__name__, (own,), {"forward": forward})

    return hang


def replaced(layer: Any, ran: list[int]) -> None:
    forward = layer.gate_proj.forward
    layer.gate_proj.forward = lambda x: ran.append(1) or 2 * forward(x)


def another_tensor(layer: Any, ran: list[int]) -> None:
    class Quantized(nn.Parameter):
        pass

    layer.up_proj.weight = Quantized(layer.up_proj.weight.detach())
    layer.up_proj.weight.register_hook(lambda gradient: ran.append(1))


NOT_PLAIN: dict[str, Callable[[Any, list[int]], Any]] = {
    "hook": hooked("up_proj", "register_forward_hook"),
    "pre-hook": hooked("down_proj", "register_forward_pre_hook"),
    "backward hook": hooked("gate_proj", "register_full_backward_hook"),
    "bias": biased,
    "subclass": subclassed("down_proj"),
    "forward of its own": replaced,
    "another tensor": another_tensor,
    "hook of the activation": hooked("act_fn", "register_forward_hook"),
    "another activation": subclassed("act_fn"),
}


@pytest.mark.parametrize("hang", NOT_PLAIN.values(), ids=NOT_PLAIN)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_hangs_on_a_projection_or_the_activation_runs(
    hang: Callable[[Any, list[int]], Any], when: str, calls: list[Any]
) -> None:
    model, ran = tiny_model(), []
    batch = tiny_batch(model)
    if when == "after":
        apply_patch(model, layers=True)
    hang(model.model.layers[0].mlp, ran)
    if when == "before":
        apply_patch(model, layers=True)
    model.double()
    ours = step(model, batch)
    assert ran == [1]
    assert len(calls) == model.config.num_hidden_layers - 1
    truth = step(revert_patch(model), batch)
    assert_same_step(ours, truth)


def test_an_activation_whose_forward_was_replaced_since_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ran = apply_patch(tiny_model(), layers=True), []
    activation = type(model.model.layers[0].mlp.act_fn)
    monkeypatch.setattr(activation, "forward", lambda self, x: ran.append(1) or x)
    model(**tiny_batch(model))
    assert len(ran) == model.config.num_hidden_layers


@pytest.mark.parametrize(("projection", "functions"), [("q_proj", 2), ("up_proj", 0)])
def test_adapters_elsewhere_leave_a_layer_one_function(
    projection: str, functions: int, calls: list[Any]
) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=[projection], init_lora_weights=False)
    model = apply_patch(peft.get_peft_model(tiny_model(), config), layers=True)
    model(**tiny_batch(model.get_base_model())).loss.backward()
    assert len(calls) == functions


def test_a_gate_of_another_dtype_than_its_product_is_promoted() -> None:
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda *args: args[2].double())
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    batch = tiny_batch(model)
    truth = model(**batch).loss
    torch.testing.assert_close(apply_patch(model, layers=True)(**batch).loss, truth)


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
        with pytest.raises(ValueError, match=r"no gated layer .* activation must be"):
            apply_patch(model, layers=["gated"])
    counts = count_layers(apply_patch(model, layers=True))
    assert counts["gated"] == (0 if has_none else 2)
    torch.testing.assert_close(model(**batch).loss, truth)


class Partitioned(dict):
    """The parameters of a module under ZeRO-3, whose hooks gather them for the module's forward."""

    is_gathered = False

    def __getitem__(self, name: str) -> Any:
        assert self.is_gathered, f"{name} would be gathered once more"
        return super().__getitem__(name)


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_hooks_that_gather_parameters_do_nothing_for_an_activation(
    model_type: str, record: Callable[..., list[Any]]
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
    calls = record(mlp, "run_gated")
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
    monkeypatch.setattr(layer, "forward", as_of(layer.__module__, forward))
    counts = count_layers(apply_patch(model, layers=True))
    expected = {"rms_norm": 5, "rotary": 2, "attention": 2}
    assert counts == dict.fromkeys(counts, 0) | expected


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
    before = torch.get_rng_state()
    try:
        apply_patch(model, layers=True)
    finally:
        hook.remove()
    assert torch.equal(torch.get_rng_state(), before)
    assert count_layers(model)["gated"] == 2
    assert not calls
