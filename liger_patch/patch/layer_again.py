"""Inputs of checkpointed layers that are not kept: the layer before them runs once more.

The input of a decoder layer is what the layer before it returned. So every n-th input is enough
(``checkpoint_every=n``): in the backward pass, the others are computed from the last one that was
kept, by the calls that computed them first, with the random state and the autocast of these calls.
Recursive checkpointing: Chen et al., "Training deep nets with sublinear memory cost"
(arXiv:1604.06174).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


class Saved(Protocol):
    """A saved input of a checkpointed layer."""

    def peek(self) -> Tensor:
        """Return the tensor, which ``unpack`` will be asked for soon."""
        ...

    def unpack(self) -> Tensor:
        """Return the tensor, which may not be needed again."""
        ...


_HIDDEN = object()  # stands for the hidden states among the arguments of a call


class _Noted:
    """A tensor as it is now, without holding it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._version = weakref.ref(tensor), tensor._version

    def is_still(self, tensor: Tensor) -> bool:
        """Return whether a tensor is this one, and has not been modified in place."""
        return self.tensor() is tensor and tensor._version == self._version


class LayerCall:
    """A call of a checkpoint function with a layer, without the hidden states that it takes.

    Args:
        function, args, kwargs: of the call, before it runs.
        hidden: the hidden states, one of ``args``.
    """

    saved: Saved | None = None  # what gives the hidden states again
    _result: _Noted | None = None

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, hidden: Tensor
    ) -> None:
        self._function, self._kwargs = function, kwargs
        self._args = [_HIDDEN if each is hidden else each for each in args]
        self._hidden = _Noted(hidden)
        self._requires_grad = hidden.requires_grad
        kinds = {"cpu", hidden.device.type}
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        }
        self._random = torch.get_rng_state(), *get_device_states(hidden)
        self._device_type = hidden.device.type

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the hidden states, which the layer has not overwritten."""
        return self._hidden.is_still(tensor)

    def note(self, result: Any) -> None:
        """Note what the call has returned, if it can give that again."""
        result, hidden = _hidden_states(result), self._hidden.tensor()
        is_same = self.saved is not None and hidden is not None and self.takes(hidden)
        if is_same and type(result) is Tensor:
            self._result = _Noted(result)

    def returned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is what the call has returned, and has not changed since."""
        return self._result is not None and self._result.is_still(tensor)

    def again(self) -> Tensor:
        """Run the call again, as the backward pass of its layer will, and return its result."""
        assert self.saved is not None
        hidden = self.saved.peek().detach().requires_grad_(self._requires_grad)
        args = [hidden if each is _HIDDEN else each for each in self._args]
        state, devices, states = self._random
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices, device_type=self._device_type))
            torch.set_rng_state(state)
            set_device_states(devices, states, device_type=self._device_type)
            for kind, (enabled, dtype) in self._autocast.items():
                # weights that are cast here without gradients are not for the backward pass
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            stack.enter_context(torch.enable_grad())  # the same code runs as before
            return _hidden_states(self._function(*args, **self._kwargs)).detach()


class ComputedAgain:
    """A saved input that is the result of the layer before, which runs again for it."""

    def __init__(self, call: LayerCall) -> None:
        self._call = call
        self._tensor: Tensor | None = None

    def peek(self) -> Tensor:
        if self._tensor is None:
            self._tensor = self._call.again()
        return self._tensor

    def unpack(self) -> Tensor:
        tensor, self._tensor = self.peek(), None
        return tensor


def _hidden_states(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) and result else result
