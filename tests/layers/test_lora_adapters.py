"""Adapters that change between the calls of a model with LoRA layers on kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from lora_models import (
    ALL,
    LAYER,
    MARKS,
    ROWS,
    Calls,
    Groups,
    adapted,
    assert_same,
    batch_of,
    copies,
    lora_layers,
    peft,
    training_step,
)
from peft.optimizers import create_lorafa_optimizer
from peft.utils import hotswap
from tiny_models import tiny_model
from training_step import call

from liger_patch import apply_patch, patch_status, revert_patch
from liger_patch.layers.lora import not_plain
from liger_patch.layers.replace import count_layers

pytestmark = MARKS


def second(model: Any) -> Any:
    """Add an adapter of another rank and scale, and leave the first active."""
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=["q_proj", "up_proj"], init_lora_weights=False
    )
    model.add_adapter("second", config)
    return model


def switched(model: Any) -> None:
    second(model).set_adapter("second")


def switched_back(model: Any) -> None:
    switched(model)
    model.set_adapter("default")


def deleted(model: Any) -> None:
    switched(model)
    model.delete_adapter("default")


def unmerged(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def scaled(model: Any) -> None:
    for layer in lora_layers(model).values():
        layer.scale_layer(3.0)


def renewed(model: Any) -> None:
    """As an optimiser that gives parameters new memory does."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data * 1.5


def hotswapped(model: Any, **options: Any) -> None:
    """Swap in an adapter of another scale, by default of another rank too."""
    other = adapted(base=tiny_model(ROWS["llama"]).double(), **{"r": 2, "lora_alpha": 7, **options})
    weights = {name: value for name, value in other.state_dict().items() if "lora_" in name}
    swap = hotswap.hotswap_adapter_from_state_dict
    swap(model, weights, "default", other.peft_config["default"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)  # a larger one comes without


SECOND: Groups = [("q_proj",), ("up_proj",)]
PLAIN_STATES: dict[str, tuple[Callable[[Any], object], Groups]] = {
    "second adapter, not active": (second, LAYER),
    "switched": (switched, SECOND),
    "switched back": (switched_back, LAYER),
    "first one deleted": (deleted, SECOND),
    "merged and unmerged": (unmerged, LAYER),
    "scaled": (scaled, LAYER),
    "new memory": (renewed, LAYER),
    "swapped for one of a smaller rank": (hotswapped, LAYER),
    "swapped for one of a larger rank": (lambda model: hotswapped(model, r=6), LAYER),
    "evaluation and training": (lambda model: model.eval().train(), LAYER),
}


@pytest.mark.parametrize("state", PLAIN_STATES)
def test_adapters_are_asked_for_at_every_call(state: str, calls: Calls) -> None:
    change, groups = PLAIN_STATES[state]
    eager, model, batch = copies()
    training_step(model, batch)
    for each in (eager, model):
        change(each)
    assert_same(model, eager, batch)
    calls.clear()
    training_step(model, batch)
    ran, by_peft = calls.taken(model)
    assert ran == groups * 2
    assert len(by_peft) == (2 * 5 if groups == SECOND else 0)  # those without an active adapter


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


def test_the_optimizer_of_lora_fa() -> None:
    """Which freezes A, and gives B's gradient another form."""
    eager, model, batch = copies()
    optimizer = create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=0.1)
    before = training_step(eager, batch)["loss"]
    for _ in range(2):
        call(model, batch).loss.backward()
        optimizer.step()
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            theirs.data.copy_(ours)
            theirs.requires_grad_(ours.requires_grad)
        assert_same(model, eager, batch)
    assert training_step(model, batch)["loss"] < before


@pytest.mark.parametrize("name", ["disable_adapter", "adapter_names"])
def test_contexts_of_peft(name: str) -> None:
    eager, model, batch = copies()
    before = training_step(model, batch)["loss"]
    if name == "disable_adapter":
        with eager.disable_adapter(), model.disable_adapter():
            truth, ours = eager(**batch).loss, model(**batch).loss
    else:  # an adapter for each row of the batch
        for each in (eager, model):
            second(each).eval()
        names = {"adapter_names": ["second", "default"]}
        truth, ours = eager(**batch, **names).loss, model(**batch, **names).loss
    assert_no_worse({"": ours}, {"": truth}, {"": truth}, torch.float32)
    assert not torch.equal(ours, before)  # type: ignore[arg-type]
    assert_same(model, eager, batch)


def test_weights_that_are_merged_for_good() -> None:
    eager, model, batch = copies()
    training_step(model, batch)
    results = []
    for each in (eager, model):
        merged = each.merge_and_unload()
        assert not lora_layers(merged)
        results.append({"loss": merged(**batch).loss.detach()})
    assert count_layers(merged)["lora"] == 0
    assert_no_worse(results[1], results[0], results[0], torch.float32)
    revert_patch(merged)


def test_an_adapter_that_is_added_after_the_patch(calls: Calls) -> None:
    """To layers that had none."""
    eager, model, batch = copies(target_modules=["q_proj"])
    options = {"r": 2, "target_modules": list(ALL), "init_lora_weights": False}
    for each in (eager, model):
        torch.manual_seed(2)
        each.add_adapter("second", peft.LoraConfig(**options))
        each.set_adapter("second")
    assert_same(model, eager, batch)
    calls.clear()
    training_step(model, batch)
    assert calls.taken(model) == (LAYER * 2, [])


def test_an_adapter_in_the_place_of_a_deleted_one(calls: Calls) -> None:
    """Of the same name, and of other layers."""
    eager, model, batch = copies(target_modules=["q_proj"])
    training_step(model, batch)
    for each in (eager, model):
        torch.manual_seed(2)
        options = {"r": 2, "target_modules": list(ALL), "init_lora_weights": False}
        each.delete_adapter("default")
        each.add_adapter("default", peft.LoraConfig(**options))
        each.set_adapter("default")
    assert_same(model, eager, batch)
    calls.clear()
    training_step(model, batch)
    assert calls.taken(model) == (LAYER * 2, [])


def test_the_same_configuration_once_more(calls: Calls) -> None:
    base: Any = apply_patch(tiny_model(ROWS["llama"]).double())
    config = peft.LoraConfig(r=4, target_modules=list(ALL), task_type="CAUSAL_LM")
    for _ in range(2):
        model = peft.get_peft_model(base, config)
        calls.clear()
        training_step(model, batch_of(model))
        assert calls.taken(model) == (LAYER * 2, [])
        assert model.unload() is base
        if "peft_config" in vars(base):  # PEFT 0.18
            pytest.skip("PEFT keeps the configurations of a model that it has unloaded")
