"""Backbones whose masks are deferred: which get such a class, in which calls, and how it goes."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_models import SIZES, WARNINGS, Calls, make_batch, make_model, seen_masks
from tiny_models import tiny_model
from torch import Tensor
from training_step import step
from transformers import LlamaConfig, masking_utils
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral import modeling_mistral

from liger_patch import apply_patch, registry, revert_patch
from liger_patch.layers import masks
from liger_patch.layers.deferred_mask import DeferredMask

pytestmark = WARNINGS
DYNAMO_WARNING = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf Tensor"
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch, served=True)


def _compiled_layer(model: Any) -> None:
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")


def _compiled_forward(model: Any) -> None:
    layer = model.model.layers[1]
    layer.forward = torch.compile(layer.forward, backend="eager")


def _own_forwards(of: Callable[[Any], list[Any]]) -> Callable[[Any], None]:
    """As those of Transformers' tensor-parallel plan, and of norms that it takes from the Hub."""

    def change(model: Any) -> None:
        for module in of(model.model.layers[1]):
            module.forward = functools.partial(type(module).forward, module)

    return change


CHANGES: dict[str, tuple[Callable[[Any], None], type]] = {  # of a layer, and the masks then
    "compiled layer": (_compiled_layer, Tensor),
    "compiled forward": (_compiled_forward, Tensor),
    "compiled attention": (
        lambda model: model.model.layers[1].self_attn.compile(backend="eager"),
        Tensor,
    ),
    "layer": (_own_forwards(lambda layer: [layer]), Tensor),
    "attention": (_own_forwards(lambda layer: [layer.self_attn]), Tensor),
    "compiled norm": (
        lambda model: model.model.layers[1].input_layernorm.compile(backend="eager"),
        DeferredMask,
    ),
    "others": (
        _own_forwards(lambda each: [each.input_layernorm, each.self_attn.q_proj, each.mlp]),
        DeferredMask,
    ),
}


@DYNAMO_WARNING
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CHANGES)
def test_masks_are_real_where_a_compiled_or_replaced_forward_is_given_them(
    name: str, when: str, calls: Calls
) -> None:
    """And deferred where other modules have such a forward."""
    change, expected = CHANGES[name]
    model, batch = make_model("mistral").double(), make_batch("packed")
    own, seen = step(model, batch), []
    for now in ("before", "after"):
        if now == when:
            change(model)
        if now == "before":
            apply_patch(model, layers=["attention"])
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(type(kwargs["attention_mask"])), with_kwargs=True
    )
    ours = {name.replace("_orig_mod.", ""): value for name, value in step(model, batch).items()}
    torch.testing.assert_close(ours, own)
    assert seen == [expected]
    torch._dynamo.reset()


def test_a_call_looks_at_its_modules_once(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3 has two masks: with a sliding window and without."""
    may_defer, looked_at = masks._may_defer, []
    monkeypatch.setattr(masks, "_may_defer", lambda of: looked_at.append(of) or may_defer(of))
    model = apply_patch(make_model("gemma3_text"), layers=["attention"])
    with seen_masks(model) as seen:
        model(**make_batch("packed"))
    assert len(set(seen)) == 2
    assert [type(mask) for mask in seen] == [DeferredMask] * 2
    assert looked_at == [model.model]


def test_only_calls_of_the_patched_model_defer(calls: Calls) -> None:
    """Not those of an unpatched model in another thread at the same time."""
    model, other, batch = make_model("mistral"), make_model("mistral"), make_batch("packed")
    apply_patch(model, layers=["attention"])
    assert type(other.model) is not type(model.model)
    with seen_masks(other) as seen, seen_masks(model) as ours:

        def call_other(*_: Any) -> None:
            thread = threading.Thread(target=lambda: other(**batch))
            thread.start()
            thread.join()

        handle = model.model.layers[0].register_forward_pre_hook(call_other)
        model(**batch)
        handle.remove()
        model.model(batch["input_ids"])
        assert [type(mask) for mask in seen] == [Tensor] * 2
        assert [type(mask) for mask in ours] == [DeferredMask] * 2 + [Tensor] * 2


def test_the_backbone_gets_its_class_back() -> None:
    model = apply_patch(make_model("llama"))
    derived = type(model.model)
    assert derived is not LlamaModel
    assert issubclass(derived, LlamaModel)
    assert inspect.signature(derived.forward) == inspect.signature(LlamaModel.forward)
    again = pickle.loads(pickle.dumps(model))
    assert type(again.model) is type(copy.deepcopy(model).model) is derived
    assert type(apply_patch(model, layers=["rms_norm"]).model) is LlamaModel
    assert type(apply_patch(model, layers=["attention"]).model) is derived
    assert type(revert_patch(model).model) is LlamaModel
    assert type(apply_patch(make_model("llama"), layers=False).model) is LlamaModel


def test_makers_of_masks_are_found_in_functions_within_a_forward() -> None:
    """As in those of dots.llm1 in later versions of Transformers."""
    row = next(row for row in registry.ARCHITECTURES if row.model_type == "dots1")
    model = apply_patch(tiny_model(row), layers=["attention"])
    assert getattr(type(model.model), masks.DEFERS_MASKS)


@pytest.mark.parametrize("replaced", ["maker of a user", "function of a library in the table"])
def test_a_maker_of_masks_that_somebody_has_replaced_runs(
    replaced: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ran = apply_patch(make_model("mistral"), layers=["attention"]), []

    def another(own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: ran.append(1) or own(*args, **kwargs)

    if replaced == "maker of a user":
        name = "create_sliding_window_causal_mask"
        monkeypatch.setattr(modeling_mistral, name, another(getattr(modeling_mistral, name)))
    else:
        table = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
        monkeypatch.setitem(table, "sdpa", another(masking_utils.sdpa_mask))
    with seen_masks(model) as seen:
        model(**make_batch("plain"))
    assert ran == [1]
    assert [type(mask) for mask in seen] == [Tensor] * 2


def test_classes_whose_code_is_not_transformers_stay() -> None:
    class Own(LlamaModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = make_model("llama")
    model.model.__class__ = Own
    apply_patch(model, layers=["attention"])
    assert type(model.model) is Own
    assert masks.mask_deferring_class(Own(LlamaConfig(**SIZES))) is None
