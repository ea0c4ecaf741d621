"""What deferred logits record: the steps since the head, as a chain of tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.deferred.head_call import HeadCall


class Step(NamedTuple):
    """One recorded operation on logits (..., V).

    Attributes:
        kind: "scale", "add", "tanh", "cast", "move", "rows", "detach", "clone" or "layout" (on
            the ranks of a group).
        function: the operation. It takes ``arguments``, then real logits, and for "add" the real
            values of ``other``. That of "rows" leaves the last dimension whole, so it applies to
            hidden states as well.
        arguments: kept apart from the function, as torch.compile cannot rebuild a closure.
        factor: what "scale" multiplies by.
        other: what "add" adds.
        grad_enabled: whether gradients were enabled when the step was recorded.
        dtype: of its result.
    """

    kind: str
    function: Callable[..., Tensor]
    arguments: tuple[Any, ...] = ()
    factor: float = 1.0
    other: Recordable | None = None
    grad_enabled: bool = True
    dtype: torch.dtype | None = None

    def apply(self, *tensors: Tensor) -> Tensor:
        return self.function(*self.arguments, *tensors)


class Recordable(Tensor):
    """Logits (..., V) that steps can be recorded on. ``DeferredLogits`` has its methods.

    Attributes:
        head_call: the product of the head that they begin with.
        rows: (..., H), the hidden states of the rows that were chosen so far.
        parent: the logits before the last step; None for those of the head.
        step: the last step; None for those of the head.
        shares_memory: whether eager's result of that step would share its input's memory.
        recorded_by: the autograd node that recorded the step.
        value: the real logits where they have been computed.
        hooks: of engines on the gradient, by the id of their handles; None before the first.
        then: returns these logits after one more step.
        real_logits: returns the real logits, computed at the first call.
    """

    head_call: HeadCall
    rows: Tensor
    parent: Recordable | None
    step: Step | None
    shares_memory: bool
    recorded_by: Any
    value: Tensor | None = None
    hooks: OrderedDict[int, Callable] | None = None

    then: Callable[..., Tensor]
    real_logits: Callable[[], Tensor]

    def read(self, name: str) -> Tensor:
        """Return the real logits for the named operation, and tell the forward pass of it."""
        if self.value is None:
            self.head_call.owner.note_read(name)
        return self.real_logits()


def strides(rows: Tensor, vocab_size: int) -> tuple[int, ...]:
    """Return the strides of logits (..., V) that are laid out as ``rows`` (..., H)."""
    hidden_size = rows.shape[-1]
    return (*[stride // hidden_size * vocab_size for stride in rows.stride()[:-1]], 1)


def real(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or the real logits that it defers."""
    return tensor.real_logits() if isinstance(tensor, Recordable) else tensor
