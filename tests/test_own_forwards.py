"""A forward that somebody sets on an instance runs, before and after a patch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_batch
from torch import Tensor
from training_step import call

from liger_patch import apply_patch, patch_status, revert_patch


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
    assert not outputs.logits.is_computed
    assert patch_status(model).fused
    torch.testing.assert_close(outputs.loss, expected)
    call(model, {name: value for name, value in batch.items() if name != "labels"})
    assert counted.calls == 2
    revert_patch(model)
    assert vars(model)["forward"] is counted
    assert type(call(model, batch).logits) is Tensor
    assert counted.calls == 3


@pytest.mark.parametrize("another", [False, True])
def test_a_forward_set_after_the_patch_runs_the_patched_one(another: bool, model: Any) -> None:
    """And another that was set before the patch. After a revert it runs the model's own."""
    batch = tiny_batch(model)
    expected = call(model, batch).loss
    counted = [Counted(model)] * another
    apply_patch(model)
    counted.append(Counted(model))
    for times in (1, 2):
        outputs = call(model, batch)
        assert [each.calls for each in counted] == [times] * len(counted)
        assert not outputs.logits.is_computed
        torch.testing.assert_close(outputs.loss, expected)
        if another:
            apply_patch(model, chunk_mib=3)
    if not another:
        del model.forward
        assert not call(model, batch).logits.is_computed
        last = Counted(model)
        revert_patch(model)
        assert type(call(model, batch).logits) is Tensor
        assert last.calls == 1
