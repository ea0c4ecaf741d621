"""The inputs and options of a head between forward and backward pass."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.head.options import LossOptions


def save_inputs(ctx: Any, inputs: Sequence[Any], options: LossOptions) -> None:
    """Save the tensors among the inputs and options: one that is changed in place before the
    backward pass needs it is an error there. A quantised weight is kept as it is.
    """
    ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
    ctx.options = options
    saved = (v if isinstance(v, Tensor) else None for v in inputs)
    ctx.save_for_backward(*saved, options.class_weight)


def saved_inputs(ctx: Any) -> tuple[HeadInputs, LossOptions]:
    """What ``save_inputs`` was given."""
    *tensors, class_weight = ctx.saved_tensors
    pairs = zip(tensors, ctx.others, strict=True)
    inputs = HeadInputs(*(other if saved is None else saved for saved, other in pairs))
    return inputs, replace(ctx.options, class_weight=class_weight)
