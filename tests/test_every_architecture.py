"""Every row of the registry: one training step in float64 computes the loss, each gradient and the
logits of the eager model, on layers of the kinds that the row names, and everything can be undone.
Rows are data that `find` and the README rely on, field by field.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from rows import IS_NEWEST, is_known_well, model_type, skipped_where_eager_fails
from tiny_models import tiny_batch, tiny_model
from training_step import assert_fused, assert_same_step, call, gradients, router_arguments
from transformers import PreTrainedModel

from liger_patch import apply_patch, patch_status, registry, revert_patch
from liger_patch.cli.doctor import PACKAGES
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.layers.replace import count_layers
from liger_patch.registry import ARCHITECTURES


def attributes(model: PreTrainedModel) -> dict[str, Any]:
    return {name: (type(m), set(vars(m))) for name, m in model.named_modules()}


@pytest.mark.parametrize("row", registry.available(), ids=model_type)
def test_one_step_of_every_architecture(row: registry.Architecture) -> None:
    with skipped_where_eager_fails(row.model_type):
        model = tiny_model(row).double()
        arguments = {**tiny_batch(model), **router_arguments(model)}
        outputs = call(model, arguments)
        eager = {"loss": outputs.loss.detach(), **gradients(model, outputs.loss)}
        logits = outputs.logits.detach()
    if not IS_NEWEST and registry.row_of(model) is None:
        pytest.skip(
            f"model type {model.config.model_type} in Transformers {transformers.__version__}"
        )
    before = attributes(model)
    apply_patch(model, strict=True)
    outputs = call(model, arguments)
    ours = {"loss": outputs.loss.detach(), **gradients(model, outputs.loss)}
    assert_fused(model)
    status = patch_status(model)
    assert status.architecture == "tested"
    assert isinstance(outputs.logits, DeferredLogits)
    assert not outputs.logits.is_computed
    assert_same_step(ours, eager)
    torch.testing.assert_close(torch.as_tensor(outputs.logits.detach()), logits)
    counts = count_layers(model)
    found = {layer for layer, count in counts.items() if count}
    # in an older Transformers, attentions had classes of other names
    kinds = set(row.kinds.split())
    assert found == kinds or not IS_NEWEST
    assert ("rms_norm" in found) == ("rms_norm" in kinds) or not is_known_well(row)
    for layer, count in counts.items():
        assert not count or f"{count} {layer}" in str(status)
    revert_patch(model)
    assert attributes(model) == before
    assert torch.equal(call(model, arguments).loss, eager["loss"])


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
