"""Indexing deferred logits: every index gives what it gives of the eager logits, or its error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eager_logits import MASK, assert_same, outcome
from tiny_models import VOCAB_SIZE as V
from torch import Tensor

from liger_patch.deferred.tensor import DeferredLogits

INDICES: dict[str, Any] = {
    "int": 0,
    "ints": (1, 2),
    "slice": slice(1, None),
    "three slices": (slice(None), slice(None, -1), slice(None)),
    "slice of the vocabulary": (slice(None), slice(None), slice(0, 7)),
    "one word": (slice(None), slice(None), 5),
    "ellipsis, last": (..., -1),
    "ellipsis, slice": (..., slice(None, -1)),
    "ellipsis, rows": (..., slice(None, -1), slice(None)),
    "row, ellipsis": (1, ...),
    "three ints, ellipsis": (1, 2, 3, ...),
    "row, ellipsis, all": (1, ..., slice(None)),
    "None": None,
    "slice, None": (slice(None), None),
    "bool tensor": torch.tensor(True),
    "mask of tokens": MASK,
    "mask of sequences": torch.tensor([True, False]),
    "mask, all": (MASK, slice(None)),
    "mask, word": (MASK, 5),
    "mask of the vocabulary": (..., torch.arange(V) % 2 == 0),
    "mask of all": torch.arange(2 * 9 * V).view(2, 9, V) % 3 == 0,
    "row, mask": (1, MASK[0]),
    "empty mask": torch.zeros_like(MASK),
    "indices": torch.tensor([1, 0, 1]),
    "pairs of indices": (torch.tensor([0, 1]), torch.tensor([3, 4])),
    "three of indices": (torch.tensor([0, 1]), torch.tensor([3, 4]), torch.tensor([5, 6])),
    "list": [1, 0],
    "last of each": (torch.arange(2), torch.tensor([5, 7])),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_is_eagers(deferred: DeferredLogits, eager: Tensor, name: str) -> None:
    index = INDICES[name]
    ours, expected = outcome(lambda: deferred[index]), outcome(lambda: eager[index])
    assert_same(ours, expected)
    if isinstance(expected, Tensor):
        assert_same(ours * 2, expected * 2)
    assert_same(outcome(lambda: (deferred + 0)[index]), expected)


@pytest.mark.parametrize("index", [5, (0, 99), (0, 0, V), (0, 0, 0, 0), "word", 1.5])
def test_an_index_that_is_an_error_stays_one(deferred: DeferredLogits, index: Any) -> None:
    with pytest.raises((IndexError, TypeError)):
        deferred[index] + 0
