"""The option ``checkpoint_offload``: values, warnings, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from typing import Any

import pytest
import torch
from exactness import assert_same_bits
from offloaded_models import KINDS, gradients, model_of, offloaded, step, tiny_batch_of
from torch import nn

from liger_patch import apply_patch, patch_status, revert_patch
from liger_patch.patch.forward import record_of
from liger_patch.patch.layer_input import PIECE_BYTES
from liger_patch.patch.offload import FUNCTION


@pytest.mark.parametrize("value", ["cpu", None, 0, -1.0, float("inf"), float("nan"), 10**400])
def test_another_value_is_an_error(value: Any) -> None:
    said = f"checkpoint_offload must be True, False or a finite number of GiB > 0, got {value!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        apply_patch(model_of(), checkpoint_offload=value)


def test_patching_again_replaces_the_option() -> None:
    model = apply_patch(model_of(), checkpoint_offload=True)
    record = record_of(model)
    assert record is not None
    first = record.offload
    assert first is not None
    apply_patch(model, checkpoint_offload=True)
    assert record.offload is first
    for gib in (64, 2.5):
        apply_patch(model, checkpoint_offload=gib)
        second = record.offload
        assert second is not None
        assert second is not first
        assert second.host_gib == gib
        apply_patch(model, checkpoint_offload=gib)
        assert record.offload is second
    apply_patch(model)
    assert record.offload is None
    assert dict(patch_status(model).rows)["checkpoint offload"] == "off"


def test_revert_frees_the_host_memory() -> None:
    offload = offloaded(model := model_of(), layers=False)
    loss = model(**tiny_batch_of(model)).loss
    step(model)
    assert offload.host_bytes == 4 * PIECE_BYTES
    expected = gradients(model)
    model.zero_grad()
    revert_patch(model)
    assert offload.host_bytes == 0
    loss.backward()  # whose inputs are still there
    assert gradients(model).keys() == expected.keys()
    released = weakref.ref(offload)
    del offload, loss
    assert released() is None


def test_pickles_have_the_options_alone() -> None:
    offload = offloaded(model := model_of())
    step(model)
    offload.host_gib = 2.5
    loaded = pickle.loads(pickle.dumps(offload))
    assert (loaded.device_types, loaded.min_bytes, loaded.host_gib) == (("cpu",), 1, 2.5)
    assert loaded.host_bytes == 0


def functions(model: nn.Module) -> list[Any]:
    return [vars(m)[FUNCTION] for m in model.modules() if FUNCTION in vars(m)]


def test_nothing_of_it_stays_on_the_model() -> None:
    model = model_of()
    before = functions(model)
    offloaded(model)
    loss = model(**tiny_batch_of(model)).loss
    assert all(a is b for a, b in zip(functions(model), before, strict=True))
    loss.backward()
    copied = copy.deepcopy(model)
    revert_patch(model)
    assert not any("liger_patch" in name for m in model.modules() for name in vars(m))
    record = record_of(copied)
    assert record is not None
    assert record.offload is not None
    assert record.offload.host_bytes == 0
    assert_same_bits(step(copied), step(apply_patch(model)))
    assert str(record.offload).startswith("2 layer inputs")


@KINDS
def test_an_exception_leaves_nothing_behind(reentrant: bool) -> None:
    offload = offloaded(model := model_of(reentrant))
    before = functions(model)
    failing = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model)
    failing.remove()
    assert all(a is b for a, b in zip(functions(model), before, strict=True))
    found = step(model)
    gc.collect()
    assert offload.host_bytes == 2 * PIECE_BYTES
    assert_same_bits(found, step(apply_patch(model_of(reentrant))))


def test_calls_without_gradients_offload_nothing() -> None:
    offload = offloaded(model := model_of())
    with torch.no_grad():
        model(**tiny_batch_of(model))
    model.eval()
    model(**tiny_batch_of(model)).loss.backward()
    assert str(offload) == "on, no eager training step yet"
    assert offload.host_bytes == 0


@pytest.mark.parametrize(
    ("reentrant", "reason"),
    [
        (None, "no layer was checkpointed (see model.gradient_checkpointing_enable())"),
        (False, "no layer saved a contiguous cuda tensor of at least 1 MiB"),
    ],
)
def test_a_step_that_offloads_nothing_warns_once(reentrant: bool | None, reason: str) -> None:
    model = apply_patch(model_of(reentrant), checkpoint_offload=True)
    expected = step(apply_patch(model_of(reentrant)))
    message = f"liger_patch offloads no checkpoint: {reason}"
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        found = step(model)
    assert_same_bits(found, expected)
    step(model)  # without a warning: pytest makes an error of it
    assert dict(patch_status(model).rows)["checkpoint offload"] == f"none: {reason}"


def test_rows_that_are_all_too_short_are_a_warning() -> None:
    """But not behind longer ones."""
    said = "no layer saved a contiguous cpu tensor of at least 1 MiB"
    offload = offloaded(model := model_of())
    step(model)
    offload.min_bytes = 2**20
    step(model)
    assert str(offload) == f"none: {said}"
    offload = offloaded(model := model_of())
    offload.min_bytes = 2**20
    with pytest.warns(UserWarning, match=f"{said}$"):
        step(model)
