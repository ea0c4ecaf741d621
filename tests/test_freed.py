"""Models and outputs are freed when their last reference goes, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from training_step import call

from liger_patch import apply_patch, revert_patch


@pytest.fixture(autouse=True)
def garbage_is_not_collected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("use", ["nothing", "step", "read logits", "fallback", "revert", "error"])
def test_a_deleted_model_is_freed_at_once(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = apply_patch(tiny_model())
    batch = tiny_batch(model)
    outputs = None
    if use == "error":
        with pytest.raises((ValueError, IndexError)):
            call(model, batch | {"labels": batch["labels"] + 1000})
    elif use != "nothing":
        if use == "fallback":
            monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
        outputs = call(model, batch)
        if use == "read logits":
            outputs.logits[:, 1:] + 0
        outputs.loss.backward()
    if use == "revert":
        revert_patch(model)
    dead = [weakref.ref(model), weakref.ref(model.model), weakref.ref(model.lm_head)]
    gc.collect()
    del model, outputs
    assert [reference() for reference in dead] == [None] * 3


def test_outputs_are_freed_at_once(model: Any) -> None:
    outputs = call(apply_patch(model), tiny_batch(model))
    view = outputs.logits[:, 1:] * 2
    outputs.loss.backward()
    dead = [weakref.ref(outputs.loss), weakref.ref(outputs.logits), weakref.ref(view)]
    gc.collect()
    del outputs, view
    assert [reference() for reference in dead] == [None] * 3


def test_outputs_keep_no_model_alive() -> None:
    model = apply_patch(tiny_model())
    outputs = call(model, tiny_batch(model))
    expected = outputs.logits.detach().clone()
    again = call(model, tiny_batch(model))
    dead = weakref.ref(model)
    gc.collect()
    del model
    assert dead() is None
    assert torch.equal(again.logits, expected)
    again.loss.backward()
