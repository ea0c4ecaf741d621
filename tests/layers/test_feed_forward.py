"""Feed-forward layers on kernels: one function where their projections are plain, and the modules'
own calls wherever something else hangs on one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import Products, assert_same_step, step

from liger_patch import apply_patch, revert_patch
from liger_patch.layers import mlp


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each feed-forward layer that ran as one function."""
    found: list[Any] = []
    function = mlp.run_gated_mlp

    def counted(*arguments: Any, **options: Any) -> Tensor:
        found.append(arguments)
        return function(*arguments, **options)

    monkeypatch.setattr(mlp, "run_gated_mlp", counted)
    return found


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma3_text", "qwen3", "phi3", "glm4"])
def test_plain_projections_are_one_function(model_type: str, calls: list[Any]) -> None:
    model = apply_patch(tiny_model(model_type), layers=True)
    model(**tiny_batch(model))
    assert len(calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_product_that_somebody_has_replaced_runs(
    when: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    if when == "after":
        apply_patch(model, layers=True)
    linear, products = nn.functional.linear, []

    def counted(*arguments: Any) -> Tensor:
        products.append(arguments)
        return linear(*arguments)

    monkeypatch.setattr(nn.functional, "linear", counted)
    if when == "before":
        apply_patch(model, layers=True)
        products.clear()
    model.model(**{name: v for name, v in tiny_batch(model).items() if name != "labels"})
    assert len(products) == 7 * model.config.num_hidden_layers
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


def subclassed(layer: Any, ran: list[int]) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            ran.append(1)
            return 2 * super().forward(input)

    layer.down_proj.__class__ = Doubled


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
    "subclass": subclassed,
    "forward of its own": replaced,
    "another tensor": another_tensor,
}


@pytest.mark.parametrize("hang", NOT_PLAIN.values(), ids=NOT_PLAIN)
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_hangs_on_a_projection_runs(
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
    assert ran
    assert len(calls) == model.config.num_hidden_layers - 1
    truth = step(revert_patch(model), batch)
    assert_same_step(ours, truth)


@pytest.fixture
def hook_of_all_modules() -> Iterator[list[str]]:
    ran: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: ran.append(type(module).__name__)
    )
    yield ran
    handle.remove()


def test_a_hook_of_all_modules_sees_every_projection(
    hook_of_all_modules: list[str], calls: list[Any]
) -> None:
    model = apply_patch(tiny_model(), layers=True)
    before = len(hook_of_all_modules)
    model(**tiny_batch(model))
    linears = sum(type(m) is nn.Linear for m in model.model.modules())
    assert hook_of_all_modules[before:].count("Linear") >= linears
    assert not calls


def test_a_replaced_linear_layer_runs(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran = apply_patch(tiny_model(), layers=True), []
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: ran.append(1) or forward(self, x))
    model(**tiny_batch(model))
    assert len(ran) >= sum(type(m) is nn.Linear for m in model.model.modules())
    assert not calls


def test_adapters_on_some_projections_leave_the_others_layers_alone(calls: list[Any]) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model()
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = apply_patch(peft.get_peft_model(model, config), layers=True)
    model(**tiny_batch(model.get_base_model())).loss.backward()
    assert len(calls) == 2
    calls.clear()
    config = peft.LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False)
    model = apply_patch(peft.get_peft_model(tiny_model(), config), layers=True)
    model(**tiny_batch(model.get_base_model())).loss.backward()
    assert not calls


@pytest.mark.parametrize("frozen", ["gate_proj", "up_proj", "down_proj", "mlp", "layers.0"])
def test_frozen_weights_get_no_gradient(frozen: str) -> None:
    model = tiny_model().double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    batch = tiny_batch(model)
    truth = step(model, batch)
    assert_same_step(step(apply_patch(model, layers=True), batch), truth)


def test_a_gate_of_another_dtype_than_its_product_is_promoted() -> None:
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda *args: args[2].double())
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    batch = tiny_batch(model)
    truth = model(**batch).loss
    torch.testing.assert_close(apply_patch(model, layers=True)(**batch).loss, truth)
