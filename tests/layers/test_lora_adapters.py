"""Adapters, and what hangs on their layers, change between the calls of a patched model: each call
asks which layers are plain, and the others run PEFT's own forward.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from exactness import assert_no_worse
from lora_models import (
    ALL,
    LAYER,
    MARKS,
    Calls,
    adapted,
    assert_same,
    batch_of,
    beside,
    copies,
    first,
    lora_layers,
    peft,
    replaced,
    training_step,
    unmerged,
)
from peft.utils import hotswap
from slow_cases import slow_but
from tiny_models import tiny_model
from torch import Tensor, nn
from training_step import assert_right, call

from liger_patch import apply_patch, patch_status, revert_patch
from liger_patch.layers.lora import not_plain

pytestmark = MARKS


def added(model: Any, name: str = "second", **options: Any) -> Any:
    """Add an adapter of another rank and scale, and leave the first active."""
    torch.manual_seed(2)
    options = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "up_proj"], **options}
    model.add_adapter(name, peft.LoraConfig(init_lora_weights=False, **options))
    return model


def switched(model: Any, back: bool = False, **options: Any) -> None:
    added(model, **options).set_adapter("default" if back else "second")


def deleted(model: Any) -> None:
    switched(model)
    model.delete_adapter("default")


def exchanged(model: Any) -> None:
    """Another adapter of the same name, of other layers."""
    model.delete_adapter("default")
    added(model, "default", target_modules=list(ALL)).set_adapter("default")


def of_all(change: Callable[[Any], object]) -> Callable[[Any], object]:
    """A change of every LoRA layer."""
    return lambda model: [change(layer) for layer in lora_layers(model).values()]


def renewed(model: Any) -> None:
    """As an optimiser that gives parameters new memory does."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data * 1.5


def with_base_renewed(layer: Any) -> None:
    layer.base_layer.weight.data = layer.base_layer.weight.data * 1.5


def hotswapped(model: Any, **options: Any) -> None:
    """Swap in an adapter of another scale, by default of another rank too."""
    other = adapted(base=tiny_model().double(), **{"r": 2, "lora_alpha": 7, **options})
    weights = {name: value for name, value in other.state_dict().items() if "lora_" in name}
    swap = hotswap.hotswap_adapter_from_state_dict
    swap(model, weights, "default", other.peft_config["default"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)  # a larger one comes without


def doubles(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, args, output: 2 * output)


def parametrized(layer: Any) -> None:
    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    nn.utils.parametrize.register_parametrization(layer.lora_A["default"], "weight", Half())


def of_another_class(layer: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    layer.base_layer.__class__ = Doubled


def of(name: str, change: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda model: change(first(model, name))


class Case(NamedTuple):
    """What changes a model, and why which of its projections then run PEFT's own forward."""

    change: Callable[[Any], object]
    reason: str = ""
    projections: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012
    layers: int = 2
    trains: bool = True


def at(name: str, change: Callable[[Any], object], reason: str = "hooks") -> Case:
    """A change of one projection of the first layer."""
    return Case(of(name, change), reason, (name,), layers=1)


def with_options(*why: Any, trains: bool = True, **options: Any) -> Case:
    """No change, but options of the adapter."""
    return Case(lambda _: None, *why, options=options, trains=trains)


OTHERS_THAN_SECOND = tuple(name for name in ALL if name not in ("q_proj", "up_proj"))
FEW = {"target_modules": ["q_proj"]}
CASES = {
    "rank-stabilised": with_options(use_rslora=True, lora_alpha=5),
    "pattern of ranks": with_options(rank_pattern={"q_proj": 2, "down_proj": 7}),
    "pattern of scales": with_options(alpha_pattern={"k_proj": 3, "up_proj": 20}),
    "rank 1": with_options(r=1),
    "PiSSA": with_options(init_lora_weights="pissa"),
    "OLoRA": with_options(init_lora_weights="olora"),
    "B of zeros": with_options(init_lora_weights=True, trains=False),  # gradients of A are zero
    "second adapter, not active": Case(added),
    "switched": Case(switched, "0 active", OTHERS_THAN_SECOND),
    "switched back": Case(lambda m: switched(m, back=True)),
    "switched to one of more layers": Case(
        lambda m: switched(m, target_modules=list(ALL)), options=FEW
    ),
    "first one deleted": Case(deleted, "0 active", OTHERS_THAN_SECOND),
    "one in the place of a deleted one": Case(exchanged, options=FEW),
    "merged and unmerged": Case(unmerged),
    "scaled": Case(of_all(lambda layer: layer.scale_layer(3.0))),
    "new memory": Case(renewed),
    "new memory of bases": Case(of_all(with_base_renewed)),
    "another scale": Case(of_all(lambda layer: layer.set_scale("default", 2.5))),
    "swapped for one of a smaller rank": Case(hotswapped),
    "swapped for one of a larger rank": Case(lambda m: hotswapped(m, r=6)),
    "evaluation and training": Case(lambda m: m.eval().train()),
    "several active adapters": Case(
        lambda m: added(m).base_model.set_adapter(["default", "second"]),
        "2 active",
        ("q_proj", "up_proj"),
    ),
    "no active adapter": Case(
        lambda m: m.base_model.set_adapter([]), "0 active", ALL, trains=False
    ),
    "DoRA": with_options("DoraLinearVariant", ALL, use_dora=True),
    "bias of B": with_options("lora_bias=True", ALL, lora_bias=True),
    "merged": Case(lambda m: m.merge_adapter(), "adapters are merged", ALL, trains=False),
    "disabled": Case(
        lambda m: m.base_model.disable_adapter_layers(), "adapters are disabled", ALL, trains=False
    ),
    "stored transposed": Case(  # PEFT warns and corrects it of a linear layer, but by hand it stays
        of_all(lambda layer: setattr(layer, "fan_in_fan_out", True)), "fan_in_fan_out=True", ALL
    ),
    "scaling for hotswaps": Case(
        hotswap.prepare_model_for_compiled_hotswap, "its scaling is a tensor", ALL
    ),
    "hook of A": at("v_proj", lambda m: doubles(m.lora_A["default"])),
    "hook of B": at("up_proj", lambda m: doubles(m.lora_B["default"])),
    "hook of dropout": at("k_proj", lambda m: doubles(m.lora_dropout["default"])),
    "hook of a base": at("o_proj", lambda m: doubles(m.base_layer)),
    "forward of a base": at("down_proj", lambda m: replaced(m.base_layer)),
    "parametrization of A": at("q_proj", parametrized, "another class"),
    "class of a base": at("q_proj", of_another_class, "the base is a Doubled"),
}
if hasattr(peft.tuners.lora.config, "BdLoraConfig"):  # from PEFT 0.19 on
    blocks = peft.tuners.lora.config.BdLoraConfig(["o_proj"], ["q_proj"], 2, match_strict=False)
    CASES["matrices of blocks"] = with_options("BdLoraLinearVariant", ALL, use_bdlora=blocks)


@pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed")  # of a base without one
@pytest.mark.parametrize("name", CASES)
def test_every_call_asks_which_layers_are_plain(name: str, calls: Calls) -> None:
    """And the status says why the others are not."""
    case = CASES[name]
    # decompositions are in float32
    eager, model, batch = beside(adapted(base=tiny_model(), **case.options).double())
    training_step(model, batch)
    for each in (eager, model):
        case.change(each)
    if case.trains:
        assert_same(model, eager, batch)
    else:
        truth, ours = (call(each.train(), batch).loss for each in (eager, model))
        assert_no_worse({"": ours}, {"": truth}, {"": truth}, torch.float32)
    calls.clear()
    with torch.no_grad():
        model(**batch)
    groups, by_peft = calls.taken(model)
    assert sorted(by_peft) == sorted(case.projections * case.layers)
    if not case.projections:
        assert groups == LAYER * 2
        assert not_plain(model) == {}
        return
    on_kernels = {each for group in groups for each in group}
    assert on_kernels == set(ALL) - set(case.projections if case.layers == 2 else ())
    ((reason, count),) = not_plain(model).items()
    assert case.reason in reason
    assert count == len(case.projections) * case.layers
    assert f"{count} in PEFT's own forward: {reason}" in str(patch_status(model))


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "gate_proj", "down_proj", "o_proj"])
@pytest.mark.parametrize("how", slow_but(["hook", "forward"], ["hook", "pre-hook", "forward"]))
def test_what_hangs_on_a_projection_itself_runs(projection: str, how: str) -> None:
    change: Callable[[Any], object] = {
        "hook": doubles,
        "pre-hook": lambda m: m.register_forward_pre_hook(lambda _, args: (2 * args[0],)),
        "forward": replaced,
    }[how]
    for when in ("before", "after"):
        eager, model, batch = copies()
        if when == "before":
            revert_patch(model)
        of(projection, change)(eager)
        of(projection, change)(model)
        assert_same(apply_patch(model) if when == "before" else model, eager, batch)
        if (when, how) == ("before", "forward"):
            assert not_plain(model) == {"its forward was replaced": 1}


def test_full_backward_hooks_of_a_projection_see_its_gradients() -> None:
    eager, model, batch = copies()
    seen: list[list[Tensor]] = [[], []]
    for each, found in zip((eager, model), seen, strict=True):
        each.enable_input_require_grads()
        for name in ("k_proj", "up_proj"):
            first(each, name).register_full_backward_hook(
                lambda _, dx, dy, found=found: found.extend([*dx, *dy])
            )
        training_step(each, batch)
    truth, ours = ({str(i): each for i, each in enumerate(found)} for found in seen)
    assert len(truth) == 4
    assert_no_worse(ours, truth, truth, torch.float32)


def test_swaps_of_a_model_that_is_prepared_for_them() -> None:
    """Layers run PEFT's own forward, and the adapter of the head is part of a fused loss."""
    eager, model, batch = copies(target_modules=[*ALL, "lm_head"])
    for each in (eager, model):
        hotswap.prepare_model_for_compiled_hotswap(each, target_rank=6)
    assert_same(model, eager, batch)
    for each in (eager, model):
        hotswapped(each, r=6, target_modules=[*ALL, "lm_head"])
    assert_same(model, eager, batch)
    assert patch_status(model).fused
    assert list(not_plain(model).values()) == [14]


def test_autocast_between_steps() -> None:
    eager, model, batch = beside(adapted())
    truth = training_step(copy.deepcopy(eager).double(), batch)
    for autocast in (True, False, True, False):
        steps = (training_step(each, batch, autocast=autocast) for each in (model, eager))
        assert_right(*steps, truth, torch.bfloat16 if autocast else torch.float32)


def test_hooks_of_all_modules(calls: Calls) -> None:
    eager, model, batch = copies()
    training_step(model, batch)
    seen: set[nn.Module] = set()
    hook = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.add(m))
    try:
        assert_same(model, eager, batch)
        assert len(calls.of_step(model, batch)[1]) == 14
    finally:
        hook.remove()
    assert {each.base_layer for each in lora_layers(model).values()} <= seen
    assert calls.of_step(model, batch) == (LAYER * 2, [])


def test_no_call_keeps_adapters_that_the_model_has_dropped() -> None:
    _, model, batch = copies()
    training_step(model, batch)
    weights = [weakref.ref(p) for n, p in model.named_parameters() if "lora_" in n]
    exchanged(model)
    gc.collect()
    assert [each() for each in weights] == [None] * len(weights)


def test_an_adapter_for_each_row_of_a_batch() -> None:
    eager, model, batch = copies()
    before = training_step(model, batch)["loss"]
    for each in (eager, model):
        added(each).eval()
    names = {"adapter_names": ["second", "default"]}
    truth, ours = eager(**batch, **names).loss, model(**batch, **names).loss
    assert_no_worse({"": ours}, {"": truth}, {"": truth}, torch.float32)
    assert not torch.equal(ours, before)  # type: ignore[arg-type]
    assert_same(model, eager, batch)


def test_the_same_configuration_once_more(calls: Calls) -> None:
    base: Any = apply_patch(tiny_model().double())
    config = peft.LoraConfig(r=4, target_modules=list(ALL), task_type="CAUSAL_LM")
    for _ in range(2):
        model = peft.get_peft_model(base, config)
        assert calls.of_step(model, batch_of(model)) == (LAYER * 2, [])
        assert model.unload() is base
        if "peft_config" in vars(base):  # PEFT 0.18
            pytest.skip("PEFT keeps the configurations of a model that it has unloaded")
