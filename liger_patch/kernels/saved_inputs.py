"""The inputs of a head between the forward and the backward pass of an autograd function."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from liger_patch.kernels.head_inputs import HeadInputs


def save_inputs(ctx: Any, inputs: Sequence[Any]) -> None:
    """Save the tensors among the inputs; what is none, a quantised weight, needs no saving."""
    ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
    ctx.save_for_backward(*(v if isinstance(v, Tensor) else None for v in inputs))


def saved_inputs(ctx: Any) -> HeadInputs:
    """What ``save_inputs`` was given."""
    pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
    return HeadInputs(*(other if saved is None else saved for saved, other in pairs))
