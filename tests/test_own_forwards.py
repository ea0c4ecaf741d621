"""A forward that somebody sets on an instance runs, before and after a patch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from training_step import call

from liger_patch import apply_patch, patch_status, registry, revert_patch

LLAMA = next(row for row in registry.ARCHITECTURES if row.model_type == "llama")


@pytest.fixture
def model() -> Any:
    return tiny_model(LLAMA)


class Counted:
    """A forward that is set on the instance, as accelerate's hooks are."""

    def __init__(self, model: Any) -> None:
        self.calls = 0
        self.inner = model.forward
        model.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.inner(*args, **kwargs)


def test_a_forward_set_before_the_patch_still_runs(model: Any) -> None:
    batch = tiny_batch(model)
    expected = call(model, batch).loss
    counted = Counted(model)
    apply_patch(model)
    outputs = call(model, batch)
    assert counted.calls == 1
    assert not outputs.logits.is_computed
    assert patch_status(model).fused
    torch.testing.assert_close(outputs.loss, expected)
    call(model, {name: value for name, value in batch.items() if name != "labels"})
    assert counted.calls == 2
    revert_patch(model)
    assert vars(model)["forward"] is counted
    assert type(call(model, batch).logits) is Tensor
    assert counted.calls == 3


def test_a_forward_set_after_the_patch_runs_the_patched_one(model: Any) -> None:
    batch = tiny_batch(model)
    expected = call(model, batch).loss
    apply_patch(model)
    counted = Counted(model)
    outputs = call(model, batch)
    assert counted.calls == 1
    assert not outputs.logits.is_computed
    torch.testing.assert_close(outputs.loss, expected)
    del model.forward
    assert not call(model, batch).logits.is_computed


def test_a_forward_set_before_and_one_after_both_run(model: Any) -> None:
    first = Counted(model)
    apply_patch(model)
    second = Counted(model)
    assert not call(model, tiny_batch(model)).logits.is_computed
    assert (first.calls, second.calls) == (1, 1)
    apply_patch(model, chunk_mib=3)
    assert not call(model, tiny_batch(model)).logits.is_computed
    assert (first.calls, second.calls) == (2, 2)


def test_a_forward_set_after_the_patch_goes_on_unpatched_after_revert(model: Any) -> None:
    apply_patch(model)
    counted = Counted(model)
    revert_patch(model)
    outputs = call(model, tiny_batch(model))
    assert counted.calls == 1
    assert type(outputs.logits) is Tensor
