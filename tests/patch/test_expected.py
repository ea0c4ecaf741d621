"""Labels that are counted before the model runs, also where the loss is given others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from torch import Tensor
from training_step import step

from liger_patch import apply_patch, patch_status
from liger_patch.kernels.head import labels as labels_module


@pytest.fixture
def counts(record: Callable[..., list[int]]) -> list[int]:
    """A list that grows with every count of labels."""
    return record(labels_module.CompactedLabels, "__init__", lambda self, labels, *_: len(labels))


def make_models() -> tuple[Any, Any]:
    """A patched model and an unpatched one."""
    return apply_patch(tiny_model(), layers=False), tiny_model()


def before_layers(model: Any, act: Callable[[], object]) -> None:
    def hook(*_: Any) -> None:
        act()

    model.model.layers[0].register_forward_pre_hook(hook)


@pytest.mark.parametrize("option", ["labels", "shift_labels", "ignore_index", "num_items_in_batch"])
def test_labels_are_counted_once_before_the_model_runs(option: str, counts: list[int]) -> None:
    model, unpatched = make_models()
    batch: dict[str, Any] = tiny_batch(model)
    if option == "shift_labels":
        batch["shift_labels"] = batch["labels"].roll(-1, 1)
    elif option == "ignore_index":
        batch["ignore_index"] = 7
        batch["labels"] = batch["labels"].clamp(min=7)
    elif option == "num_items_in_batch":
        batch["num_items_in_batch"] = 5
    seen: list[int] = []
    before_layers(model, lambda: seen.append(len(counts)))
    torch.testing.assert_close(step(model, batch), step(unpatched, batch))
    assert patch_status(model).fused
    assert (seen, counts) == ([1], [batch["labels"].numel()])


def hide_labels(_: Any, labels: Tensor) -> None:
    labels[:, 3:].fill_(-100)


def ignore_7(model: Any, _: Tensor) -> None:
    """As the model's own forward may choose."""
    given = model.loss_function
    model.loss_function = lambda *a, **options: given(*a, **{**options, "ignore_index": 7})


@pytest.mark.parametrize("change", [hide_labels, ignore_7])
def test_a_change_while_the_model_runs_is_seen(change: Callable, counts: list[int]) -> None:
    """By the patched model's loss as by the unpatched one's."""
    results = []
    for model in make_models():
        batch = tiny_batch(model)
        batch["labels"] = batch["labels"].clamp(min=7)
        before_layers(model, functools.partial(change, model, batch["labels"]))
        results.append(step(model, batch))
    torch.testing.assert_close(*results)
    assert len(counts) == 2


def test_nothing_is_counted_where_logits_are_to_be_returned(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    model, unpatched = make_models()
    seen: list[int] = []
    before_layers(model, lambda: seen.append(len(counts)))
    batch = tiny_batch(model)
    torch.testing.assert_close(step(model, batch), step(unpatched, batch))
    assert seen == [0]


@pytest.mark.parametrize("made", ["before", "within"])
@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_evaluation_in_inference_mode(made: str, name: str, counts: list[int]) -> None:
    """Targets that are made there have no version, also those of labels that have one. So nothing
    is counted before the model runs.
    """
    model, unpatched = make_models()
    seen: list[int] = []
    before_layers(model, lambda: seen.append(len(counts)))
    batch: dict[str, Any] = tiny_batch(model)
    if name == "shift_labels":
        batch["shift_labels"] = batch["labels"].roll(-1, 1)
    with torch.inference_mode():
        if made == "within":
            batch = {name: value.clone() for name, value in batch.items()}
        torch.testing.assert_close(model(**batch).loss, unpatched(**batch).loss)
    assert patch_status(model).fused
    assert seen == [0]
