"""Deferred logits beside eager's of the same model and batch, and how they are compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tiny_models import LLAMA, tiny_batch, tiny_model
from torch import Tensor
from training_step import call

from liger_patch import apply_patch

MASK = torch.tensor([[True, False, True] * 3, [False, True, False] * 3])  # of the batch's tokens


@functools.cache
def unchanged_model(patch: bool) -> Any:
    """Return a model that no test may change."""
    model = tiny_model(LLAMA)
    return apply_patch(model, layers=False) if patch else model


def outputs_of(patch: bool, **arguments: Any) -> Any:
    """Return the outputs of the patched or of the eager model, called with labels."""
    model = unchanged_model(patch)
    return call(model, tiny_batch(model), **arguments)


def assert_same(ours: Any, expected: Any) -> None:
    """The same values, shapes, dtypes and need of a gradient, in whatever they are nested."""
    if isinstance(expected, Tensor):
        assert isinstance(ours, Tensor)
        assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
        assert ours.requires_grad == expected.requires_grad
        assert torch.equal(torch.nan_to_num(ours), torch.nan_to_num(expected))
    elif isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(ours, expected)
    elif isinstance(expected, (tuple, list)):
        assert len(ours) == len(expected)
        for one, other in zip(ours, expected, strict=True):
            assert_same(one, other)
    else:
        assert ours == expected


def unlike(x: Tensor) -> Tensor:
    """Return other numbers in the same shape."""
    return torch.linspace(-1, 1, x.numel()).view(x.shape)


def outcome(function: Callable[[], Any]) -> Any:
    """Return what it returns, or the kind of error that it raises."""
    try:
        return function()
    except (IndexError, TypeError, RuntimeError, ValueError) as error:
        return type(error)
