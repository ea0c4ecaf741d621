"""Contenders that fail: each is reported in words and stops nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """Why there is no result."""

    failure: str


class Unsupported(Exception):
    """What a contender cannot compute, in words."""


def attempt(function: Callable[[], Result]) -> Result | Failure:
    """The function's result, or why there is none; a failure leaves no memory behind."""
    try:
        return function()
    except Exception as error:
        failure = Failure(_in_words(error))
    release_memory()  # here, where the traceback and the tensors of its frames are gone
    return failure


def release_memory() -> None:
    """Give unused memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _in_words(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    message = str(error).strip().partition("\n")[0]
    if isinstance(error, Unsupported):
        return f"does not run: {message}"
    return f"does not run: {type(error).__name__}" + (f": {message}" if message else "")
