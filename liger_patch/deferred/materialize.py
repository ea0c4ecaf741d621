"""Materialize deferred logits: compute the values that eager logits would have, lazily.

A view (a slice, ``detach``) shares the memory of the logits before it, so it sees what is written
to them. All other steps make a copy. Eager would have made that copy at once, before anything was
written to the logits: so its values are computed from the head again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from liger_patch.deferred.gradients import attach, is_foreign, open_hooks
from liger_patch.deferred.record import Recordable


def materialize(logits: Recordable) -> Tensor:
    """Return the values of these logits, computed with autograd at the first call."""
    value = logits.value
    if value is None:
        with torch.inference_mode(logits.head_call.hidden_states.is_inference()):
            value = _compute(logits, lambda parent: parent.real_logits())
    if is_foreign(logits):  # also after the first call: of a checkpoint within which they were read
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            value = cast(Tensor, _Graft.apply(logits, value))
            logits.recorded_by = logits.grad_fn
        if logits.hooks is None:
            open_hooks(logits)  # of the node, which the gradient of these values reaches
    logits.value = value
    return value


class _Graft(torch.autograd.Function):
    """Values in the place of deferred logits that another autograd function has returned."""

    @staticmethod
    def forward(ctx, deferred: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return grad_output, None


def _compute(logits: Recordable, of_view: Callable[[Recordable], Tensor]) -> Tensor:
    """Compute the values.

    Args:
        of_view: computes the values of the logits before the last step, if that step is a view.
    """
    parent, step = logits.parent, logits.step
    if parent is None or step is None:
        result = logits.head_call.logits()
    elif logits.shares_memory:
        with torch.set_grad_enabled(step.grad_enabled):
            result = step.apply(of_view(parent))
    else:
        inputs = [each for each in (parent, step.other) if each is not None]
        values = [_compute_untouched(each) for each in inputs]
        with torch.set_grad_enabled(step.grad_enabled):
            result = step.apply(*values)
    if logits.hooks is not None and result.requires_grad:
        attach(logits.hooks, result)
    return result


def _compute_untouched(logits: Recordable) -> Tensor:
    """Compute the values from the head again, without what has been written to them since."""
    return _compute(logits, _compute_untouched)
