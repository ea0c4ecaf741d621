"""Layers whose forward Transformers has decorated are put on kernels, and keep the decorator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from exactness import assert_same_bits
from tiny_models import tiny_batch, tiny_model
from training_step import step
from transformers.utils.deprecation import deprecate_kwarg

from liger_patch import apply_patch, registry
from liger_patch.layers.masks import DEFERS_MASKS
from liger_patch.layers.replace import count_layers

NAMES = "LlamaAttention", "LlamaModel", "LlamaForCausalLM"


def with_forwards(decorate: Callable[[Any], Any], *names: str) -> Any:
    """Return a tiny model whose modules of these classes have decorated forwards."""
    model = tiny_model()
    classes: dict[Any, Any] = {}  # new ones: the classes on kernels are derived once from each
    for module in model.modules():
        cls: Any = type(module)
        if cls.__name__ in names:
            if cls not in classes:
                classes[cls] = type(cls.__name__, (cls,), {"forward": decorate(cls.forward)})
            module.__class__ = classes[cls]
    return model


def renamed(forward: Any) -> Any:
    """Decorate a forward with Transformers' own decorators, as Transformers 5.24 does."""
    forward = deprecate_kwarg("old_position_ids", "100.0", "position_ids")(forward)
    return deprecate_kwarg("older_position_ids", "100.0", "position_ids")(forward)


def deferring(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(type(module), DEFERS_MASKS)]


def test_a_step_is_that_of_forwards_without_decorators() -> None:
    plain, model = apply_patch(tiny_model()), apply_patch(with_forwards(renamed, *NAMES))
    assert count_layers(model) == count_layers(plain)
    assert count_layers(model)["rotary"] == count_layers(model)["attention"] == 2
    assert deferring(model) == deferring(plain) == ["model"]
    assert registry.is_tested(model)
    batch = tiny_batch(plain)
    assert_same_bits(step(model, batch), step(plain, batch))


def test_the_decorator_of_an_attention_runs() -> None:
    model = apply_patch(with_forwards(renamed, *NAMES))
    attention, x = model.model.layers[0].self_attn, torch.randn(1, 3, model.config.hidden_size)
    positions = torch.arange(3)[None]
    arguments = {
        "position_embeddings": model.model.rotary_emb(x, positions),
        "attention_mask": None,
    }
    with pytest.warns(FutureWarning, match="`older_position_ids` is deprecated"):
        found, _ = attention(x, **arguments, older_position_ids=positions)
    assert torch.equal(found, attention(x, **arguments, position_ids=positions)[0])


@pytest.mark.parametrize("is_marked", [True, False], ids=["functools.wraps", ""])
def test_an_attention_whose_decorator_finds_its_forward_elsewhere_is_left_alone(
    is_marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a warning names the kinds of layers that Transformers has taken away so."""

    def decorate(forward: Any) -> Any:
        found = {"forward": forward}  # no variable of the decorator

        def decorated(*args: Any, **kwargs: Any) -> Any:
            return found["forward"](*args, **kwargs)

        return functools.wraps(forward)(decorated) if is_marked else decorated

    monkeypatch.setitem(globals(), "__name__", "transformers.decorators")
    model = with_forwards(decorate, "LlamaAttention")
    message = f"no attention and no rotary layer of Llama.* Transformers {transformers.__version__}"
    if registry.missing():  # nothing is promised on an older Transformers
        apply_patch(model)
    else:
        with pytest.warns(UserWarning, match=message) as caught:
            apply_patch(model)
        assert len(caught) == 1
    counts = count_layers(model)
    assert counts["rotary"] == counts["attention"] == 0
    assert counts["gated"] == 2
    apply_patch(model, layers=["rms_norm", "gated"])  # without a warning
