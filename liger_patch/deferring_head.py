"""For the duration of one forward pass, the output embedding returns deferred logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from liger_patch.deferred import DeferredLogits, HeadCall, Owner


class _DeferLinear(TorchFunctionMode):
    """Within the head's own forward: its product with its own weight is deferred."""

    def __init__(self, head: nn.Module, owner: Owner) -> None:
        super().__init__()
        self.head, self.owner = head, owner

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            hidden_states, weight, bias = _linear_arguments(*args, **kwargs)
            if weight is getattr(self.head, "weight", None) and _can_defer(
                hidden_states, weight, bias
            ):
                return DeferredLogits.of_head(HeadCall.of(hidden_states, weight, bias, self.owner))
        return func(*args, **kwargs)


def _linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _can_defer(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are plain floating-point tensors that fit each other, on one device."""
    tensors = [tensor for tensor in (hidden_states, weight, bias) if tensor is not None]
    if any(
        type(tensor) not in (Tensor, nn.Parameter) or not tensor.is_floating_point()
        for tensor in tensors
    ):
        return False
    if len({tensor.device for tensor in tensors}) > 1 or weight.dim() != 2 or weight.is_meta:
        return False
    if weight.shape[1] != hidden_states.shape[-1] or weight.shape[0] == 0:
        return False
    dtypes = {tensor.dtype for tensor in tensors}
    if torch.is_autocast_enabled(weight.device.type):
        return torch.float64 not in dtypes
    return len(dtypes) == 1


@contextmanager
def deferring_head(head: nn.Module, owner: Owner) -> Iterator[None]:
    """Within this context the output embedding ``head`` defers its product with its weight.

    Its hooks and whatever has replaced its ``forward`` run as always; a head that computes in
    another way (quantised, a tensor subclass) returns its real logits.
    """
    missing = object()
    before = vars(head).get("forward", missing)
    forward = head.forward

    def deferring_forward(*args, **kwargs):
        with _DeferLinear(head, owner):
            return forward(*args, **kwargs)

    head.forward = deferring_forward
    try:
        yield
    finally:
        if before is missing:
            del head.forward
        else:
            head.forward = before
