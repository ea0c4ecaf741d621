"""What is said of LoRA layers that run PEFT's own forward: in the status, and in a warning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lora_models import (
    LAYER,
    MARKS,
    ROWS,
    Calls,
    adapted,
    batch_of,
    copies,
    first,
    lora_layers,
    peft,
    replaced,
    training_step,
)
from tiny_models import tiny_model

from liger_patch import apply_patch, patch_status
from liger_patch.layers.lora import not_plain

pytestmark = MARKS


def test_the_status_is_that_of_the_last_calls_dtypes(calls: Calls) -> None:
    eager = adapted(dtype=torch.bfloat16)  # float32 adapters
    model, batch = apply_patch(copy.deepcopy(eager)), batch_of(eager)
    assert not_plain(model) == {}
    with pytest.warns(UserWarning, match="runs 14 of the LoRA layers: weights of several"):
        training_step(model, batch)
    training_step(model, batch)  # says no more
    calls.clear()
    training_step(model, batch)
    assert len(calls.taken(model)[1]) == 14
    assert not_plain(model) == {"weights of several dtypes outside autocast": 14}
    training_step(model, batch, autocast=True)
    assert calls.taken(model) == (LAYER * 2, [])
    assert not_plain(model) == {}


def test_adapters_that_came_after_the_patch_are_in_the_status_before_the_next_call() -> None:
    model = adapted(base=apply_patch(tiny_model(ROWS["llama"])))
    assert "14 lora" in str(patch_status(model))
    without = adapted(base=apply_patch(tiny_model(ROWS["llama"]), layers=["rms_norm"]))
    assert "lora" not in str(patch_status(without))
    assert not_plain(model) == not_plain(without) == {}


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
@pytest.mark.filterwarnings("ignore:Already found a .peft_config. attribute")
def test_a_wrapper_around_a_wrapper_is_named() -> None:
    twice = adapted(base=adapted())
    with pytest.raises(TypeError, match="got PeftModelForCausalLM around a PeftModelForCausalLM"):
        apply_patch(twice)


def test_dtypes_are_a_warning_in_training_alone() -> None:
    """Once for its adapters: pytest makes an error of any other."""
    model = apply_patch(adapted(dtype=torch.bfloat16))  # float32 adapters
    batch = batch_of(model)
    with torch.no_grad():
        model(**batch)
    model.eval()
    model(**batch)
    model.train()
    with model.disable_adapter():
        model(**batch)
    with pytest.warns(UserWarning, match="14 of the LoRA layers") as caught:
        model(**batch)
    assert "liger_patch/patch" not in caught[0].filename  # but where the model is called
    model(**batch)
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["q_proj"]))
    model.set_adapter("second")
    for name, p in model.named_parameters():
        if "second" in name:  # in the dtype of its base, by PEFT 0.18
            p.data = p.data.float()
    with pytest.warns(UserWarning, match="2 of the LoRA layers"):
        model(**batch)


def test_dtypes_of_an_earlier_call_are_no_warning() -> None:
    model = apply_patch(adapted(dtype=torch.bfloat16))
    batch = batch_of(model)
    other = next(iter(lora_layers(model).values()))
    model.get_base_model().other = other = copy.deepcopy(other)  # training does not call it
    with torch.no_grad():
        other(torch.randn(2, other.in_features, dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch)


def test_the_status_counts_layers_of_other_tuners() -> None:
    config = peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"])
    model: Any = peft.get_peft_model(tiny_model(ROWS["llama"]), config)
    apply_patch(model)
    assert not_plain(model) == {"Linear (vera)": 4}
    assert "4 in PEFT's own forward: Linear (vera)" in str(patch_status(model))


def test_the_status_counts_layers_whose_forward_was_replaced() -> None:
    model = adapted()
    replaced(next(iter(lora_layers(model).values())))
    apply_patch(model)
    assert not_plain(model) == {"its forward was replaced": 1}


class _Gathered(dict):
    """The parameters of a module under ZeRO-3, which gathers one that is read by its name."""

    def __getitem__(self, name: str) -> Any:
        raise AssertionError(f"{name} would be gathered")


def test_the_status_reads_no_weight_that_would_be_gathered() -> None:
    model = adapted()
    apply_patch(model)
    layers = lora_layers(model)
    for layer in layers.values():
        layer.base_layer.register_forward_pre_hook(lambda *_: None)
        vars(layer.base_layer)["_parameters"] = _Gathered(layer.base_layer._parameters)
    assert not_plain(model) == {"hooks within the layer": len(layers)}


def test_the_status_says_why_a_layer_was_not_asked() -> None:
    _, model, _ = copies()
    layer = first(model, "q_proj")
    torch.func.vmap(layer)(torch.randn(2, 3, 32).double())
    assert not_plain(model) == {"torch.func or a tensor subclass": 1}
    layer(torch.randn(2, 3, 32).double())
    assert not_plain(model) == {}
