"""A patched model and the outputs of its forward pass."""

from typing import Any

import pytest
from tiny_models import tiny_batch, tiny_model
from training_step import call
from transformers import PreTrainedModel

from liger_patch import apply_patch, registry


@pytest.fixture
def patched_model() -> PreTrainedModel:
    (llama,) = (row for row in registry.ARCHITECTURES if row.model_type == "llama")
    return apply_patch(tiny_model(llama))


@pytest.fixture
def outputs(patched_model: PreTrainedModel) -> Any:
    """Of the patched model, called with labels: its logits are deferred."""
    return call(patched_model, tiny_batch(patched_model))
