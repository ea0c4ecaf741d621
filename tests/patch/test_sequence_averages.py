"""Means of sequences over the forward passes of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from packed_samples import (
    AVERAGES,
    IGNORED,
    MODEL_TYPES,
    flattened,
    make_model,
    make_samples,
    truth_of,
)
from training_step import call, gradients, patched

from liger_patch import apply_patch


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("average", AVERAGES)
def test_gradient_accumulation_is_exact(average: str, model_type: str) -> None:
    model, samples = make_model(model_type), make_samples(9, 4, 13, 6, 5)
    truth = truth_of(model, samples, average)
    micro_batches = [flattened(samples[:1]), flattened(samples[1:4]), flattened(samples[4:])]
    items = sum((batch["labels"] != IGNORED).sum() for batch in micro_batches)
    named = {"num_sequences_in_batch": len(samples)} if average == "sequence" else {}
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
    with pytest.raises(ValueError, match=r"num_sequences_in_batch .*does not count these"):
        call(model, batch, num_items_in_batch=11)


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
