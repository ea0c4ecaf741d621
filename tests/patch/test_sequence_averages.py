"""Means of sequences over the forward passes of a step, and the Trainer that counts them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gloo_group import run_cases
from packed_samples import (
    AVERAGES,
    IGNORED,
    MODEL_TYPES,
    ROWS,
    Sample,
    flattened,
    make_model,
    make_samples,
    padded,
    truth_of,
)
from packed_trainer import weights_after
from rows import FAMILIES
from slow_cases import slow_but
from torch import Tensor
from training_step import Step, call, gradients, patched

from liger_patch import apply_patch, registry
from liger_patch.patch.packing import count_sequences


def takes_no_number_of_tokens(row: registry.Architecture) -> bool:
    """By its class; not one that computes a loss of its own, in older versions of Transformers."""
    model_class = getattr(transformers, row.class_name)
    names = inspect.unwrap(model_class.forward).__code__.co_names
    return not getattr(model_class, "accepts_loss_kwargs", True) and "loss_function" in names


# of the families that run every test: looking at a class imports its module
UNCOUNTED = [
    model_type
    for model_type, row in ROWS.items()
    if row.family in FAMILIES and takes_no_number_of_tokens(row)
]
QUICK = [name for name in UNCOUNTED if name != "gemma3n"][:1]  # which has two towers


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("average", AVERAGES)
def test_gradient_accumulation_is_exact(average: str, model_type: str) -> None:
    model, samples = make_model(model_type), make_samples(9, 4, 13, 6, 5)
    truth = truth_of(model, samples, average)
    micro_batches = [flattened(samples[:1]), flattened(samples[1:4]), flattened(samples[4:])]
    items = sum((batch["labels"] != IGNORED).sum() for batch in micro_batches)
    sequences = sum(count_sequences(batch) for batch in micro_batches)
    named = {"num_sequences_in_batch": sequences} if average == "sequence" else {}
    with patched(model, loss_average=average):
        losses = [
            call(model, batch, num_items_in_batch=items, **named).loss for batch in micro_batches
        ]
    loss = torch.stack(losses).sum()
    torch.testing.assert_close({"loss": loss.detach(), **gradients(model, loss)}, truth)


def test_a_number_of_tokens_alone_is_refused() -> None:
    """Divided by it, a sum of sequences' means would be far too small."""
    model = apply_patch(make_model(), loss_average="sequence")
    batch = flattened(make_samples(9, 4))
    with pytest.raises(ValueError, match=r"num_sequences_in_batch .*integrations\.transformers"):
        call(model, batch, num_items_in_batch=11)


def padded_for(model_type: str) -> Callable[[list[Sample]], dict[str, Tensor]]:
    """With what models of images ask for in training."""
    taken = inspect.signature(getattr(transformers, ROWS[model_type].class_name).forward).parameters

    def collate(samples: list[Sample]) -> dict[str, Tensor]:
        batch = padded(samples)
        no_image = torch.zeros_like(batch["input_ids"])
        names = taken.keys() & {"token_type_ids", "mm_token_type_ids"}
        return {**batch, **dict.fromkeys(names, no_image)}

    return collate


@pytest.mark.usefixtures("imported_objects_are_not_collected")
@pytest.mark.parametrize(
    ("model_type", "average"),
    [
        *(("llama", average) for average in AVERAGES),
        *slow_but([(n, "sequence") for n in QUICK], [(n, "sequence") for n in UNCOUNTED]),
    ],
)
def test_accumulated_steps_are_those_of_whole_batches(
    model_type: str, average: str, tmp_path: Path
) -> None:
    """Transformers' Trainer counts nothing for models that take no number of tokens."""
    collate, results = flattened if model_type == "llama" else padded_for(model_type), []
    for per_device, accumulated in [(4, 1), (1, 4), (2, 2)]:
        model = apply_patch(make_model(model_type), loss_average=average)
        results.append(weights_after(model, tmp_path, per_device, accumulated, collate=collate))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


@pytest.mark.usefixtures("imported_objects_are_not_collected")
@pytest.mark.parametrize("average", AVERAGES)
def test_a_step_without_a_label_leaves_the_weights_alone(average: str, tmp_path: Path) -> None:
    def without_labels(samples: Any) -> dict[str, Any]:
        batch = flattened(samples)
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}

    model = apply_patch(make_model(), loss_average=average)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    after = weights_after(model, tmp_path, 2, 2, collate=without_labels, evaluates=False)
    torch.testing.assert_close(after, before)


@pytest.mark.slow
@pytest.mark.usefixtures("imported_objects_are_not_collected")
@pytest.mark.parametrize("average", AVERAGES)
def test_steps_of_two_processes_are_those_of_one(average: str, tmp_path: Path) -> None:
    model = apply_patch(make_model(), loss_average=average)
    expected = weights_after(model, tmp_path, per_device=4, accumulated=1)
    run_cases("distributed_trainer.py", tmp_path, average)
    for rank in range(2):
        weights = torch.load(tmp_path / f"weights{rank}.pt")
        torch.testing.assert_close(weights, expected)


@pytest.mark.usefixtures("imported_objects_are_not_collected")
@pytest.mark.parametrize("model_type", ["llama", *QUICK])
def test_other_models_train_as_with_transformers_trainer(model_type: str, tmp_path: Path) -> None:
    from transformers import Trainer

    def weights(model: Any, trainer_class: Any = None) -> Step:
        how: Any = {"collate": padded_for(model_type), "trainer_class": trainer_class}
        return weights_after(model, tmp_path, 2, 2, **how)

    eager = weights(make_model(model_type), Trainer)
    torch.testing.assert_close(weights(make_model(model_type)), eager)
    torch.testing.assert_close(weights(apply_patch(make_model(model_type))), eager)


class Toy(torch.nn.Module):
    """No model of Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, input_ids: Tensor, labels: Tensor, **others: Any) -> dict[str, Tensor]:
        return {"loss": (self.scale * input_ids - labels.clamp(min=0)).abs().mean()}


@pytest.mark.usefixtures("imported_objects_are_not_collected")
def test_a_model_that_is_not_of_transformers_trains_too(tmp_path: Path) -> None:
    from transformers import Trainer

    toys: list[Any] = [Toy(), Toy()]
    expected = weights_after(toys[0], tmp_path, 2, 2, trainer_class=Trainer)
    assert expected["scale"] != 1
    torch.testing.assert_close(weights_after(toys[1], tmp_path, 2, 2), expected)


@pytest.mark.usefixtures("imported_objects_are_not_collected", "nothing_is_compiled")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_outside_the_model_is_refused(compiled: bool, tmp_path: Path) -> None:
    model: Any = apply_patch(make_model(), loss_average="sequence")
    if compiled:  # which does not say what columns it takes
        model = torch.compile(model, backend="eager")
    how = {"label_smoothing_factor": 0.1, "remove_unused_columns": not compiled}
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0\.1"):
        weights_after(model, tmp_path, 2, 2, **how)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        *((number, f"must be .* got {number!r}") for number in ("3", -1, 0, 2.5, True)),
        (torch.tensor(2.0), "got torch.float32"),
        (torch.tensor([2, 2]), "got torch.int64"),
        (torch.tensor(True), "got torch.bool"),
        (torch.tensor(-2), "must not be negative.*-2"),
    ],
)
def test_a_number_of_sequences_that_is_none_is_an_error(number: Any, message: str) -> None:
    model = apply_patch(make_model(), loss_average="sequence")
    with pytest.raises(ValueError, match=f"num_sequences_in_batch .*{message}"):
        call(model, flattened(make_samples(9, 4)), num_sequences_in_batch=number)


def test_a_number_of_sequences_of_any_kind_is_the_same() -> None:
    model = apply_patch(make_model(), loss_average="sequence")
    batch = flattened(make_samples(9, 4))
    losses = [
        call(model, batch, num_sequences_in_batch=kind(4)).loss
        for kind in (int, np.int64, torch.tensor)
    ]
    assert losses[0] == losses[1] == losses[2]


def test_a_number_of_sequences_for_means_of_tokens_is_an_error() -> None:
    model = apply_patch(make_model())
    with pytest.raises(ValueError, match="num_sequences_in_batch is for means of sequences"):
        call(model, flattened(make_samples(9, 4)), num_sequences_in_batch=2)
