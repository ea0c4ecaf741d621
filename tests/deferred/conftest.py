"""A patched model and the outputs of its forward pass, and logits of an eager one beside them."""

from typing import Any

import pytest
from eager_logits import outputs_of
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from training_step import call
from transformers import PreTrainedModel

from liger_patch import apply_patch
from liger_patch.deferred.tensor import DeferredLogits


@pytest.fixture
def patched_model() -> PreTrainedModel:
    return apply_patch(tiny_model())


@pytest.fixture
def outputs(patched_model: PreTrainedModel) -> Any:
    """Of the patched model, called with labels: its logits are deferred."""
    return call(patched_model, tiny_batch(patched_model))


@pytest.fixture
def eager() -> Tensor:
    """Logits of a model that is not patched."""
    return outputs_of(False).logits


@pytest.fixture
def deferred() -> DeferredLogits:
    """Those of the same model, patched."""
    logits = outputs_of(True).logits
    assert isinstance(logits, DeferredLogits)
    assert not logits.is_computed
    return logits
