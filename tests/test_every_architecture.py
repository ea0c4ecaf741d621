"""Every row of the registry: one training step in float64 computes the loss, each gradient and the
logits of the eager model, on layers of the kinds that the row names, and everything can be undone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from rows import RAISE_IN_EAGER, is_known_well, model_type
from tiny_models import tiny_batch, tiny_model
from training_step import assert_fused, assert_same_step, call, gradients, router_arguments
from transformers import PreTrainedModel

from liger_patch import apply_patch, patch_status, registry, revert_patch
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.layers.replace import count_layers

IS_NEWEST = not registry.missing()  # of the versions of Transformers that all rows were made for


def eager_step(row: registry.Architecture) -> tuple[Any, dict[str, Any], Any, Any]:
    """The float64 model, its arguments, and its eager loss and gradients and logits."""
    try:
        model = tiny_model(row).double()
        arguments = {**tiny_batch(model), **router_arguments(model)}
        outputs = call(model, arguments)
        step = {"loss": outputs.loss.detach(), **gradients(model, outputs.loss)}
    except Exception as error:
        if IS_NEWEST and row.model_type not in RAISE_IN_EAGER:
            raise
        pytest.skip(f"Transformers {transformers.__version__}: {type(error).__name__}: {error}")
    return model, arguments, step, outputs.logits.detach()


def attributes(model: PreTrainedModel) -> dict[str, Any]:
    return {name: (type(m), set(vars(m))) for name, m in model.named_modules()}


@pytest.mark.parametrize("row", registry.available(), ids=model_type)
def test_one_step_of_every_architecture(row: registry.Architecture) -> None:
    model, arguments, eager, logits = eager_step(row)
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
