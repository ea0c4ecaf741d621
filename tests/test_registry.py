"""The registry: its rows are data that `find` and the README rely on, field by field."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from packaging.version import Version

from liger_patch import apply_patch, registry
from liger_patch.cli.doctor import PACKAGES
from liger_patch.registry import ARCHITECTURES


def test_the_pinned_transformers_exports_the_class_of_every_row() -> None:
    """Otherwise tests and `apply_patch` take it for an older one, and expect less of all rows."""
    if Version(transformers.__version__) >= Version(PACKAGES["transformers"]):
        assert registry.missing() == []


@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [
        ("llama", "LlamaForSequenceClassification"),
        ("llama_of_tomorrow", "LlamaForCausalLM"),
        ("gemma3", "Gemma3ForCausalLM"),
        (None, "LlamaForCausalLM"),
    ],
)
def test_find_wants_both_the_model_type_and_the_class(model_type: Any, class_name: str) -> None:
    model = type(class_name, (), {"config": SimpleNamespace(model_type=model_type)})()
    assert registry.row_of(model) is None
    with pytest.raises(ValueError, match=f"model is a {class_name} .*{model_type!r}"):
        registry.find(model)


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_strict_wants_a_row_and_says_where_they_are(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=1, n_positions=8)
    config.model_type = "gpt_of_tomorrow"
    model = transformers.GPT2LMHeadModel(config)
    monkeypatch.setenv("LIGER_PATCH_STRICT", "1" if by == "environment" else "0")
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel with .* 'gpt_of_tomorrow'") as raised:
        apply_patch(model, strict=by == "argument")
    assert "docs/models.md" in str(raised.value)
    assert type(model) is transformers.GPT2LMHeadModel


def test_rows_are_unique_and_in_alphabetical_order() -> None:
    model_types = [row.model_type for row in ARCHITECTURES]
    assert model_types == sorted(set(model_types))
    assert len({row.class_name for row in ARCHITECTURES}) == len(ARCHITECTURES)
