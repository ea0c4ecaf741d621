"""What torch.compile is to make of functions that read the device and launch kernels themselves."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable)


def runs_eagerly(function: Function) -> Function:
    """Decorator: torch.compile calls the function as it is, between two graphs of its own."""
    return cast(Function, torch.compiler.disable(function))
