"""One product of the output embedding, made in a forward pass and computed when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from liger_patch.changes import State, state_of
from liger_patch.kernels.head_inputs import QuantizedWeight


class Owner(Protocol):
    """The forward pass that deferred logits belong to."""

    def note_read(self, operation: str) -> None:
        """Take note that the named operation needs the values of the logits."""


@dataclass(frozen=True)
class HeadCall:
    """One product of the output embedding: its inputs, the state it was made in, and its owner.

    Attributes:
        product: the real logits of hidden states, weight and bias; where the weight is quantised,
            of hidden states alone.
    """

    hidden_states: Tensor
    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    product: Callable[..., Tensor]
    grad_enabled: bool
    autocast_dtype: torch.dtype | None
    states: tuple[State | None, ...]
    owner: Owner

    @classmethod
    def of(
        cls,
        hidden_states: Tensor,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        owner: Owner,
        *,
        product: Callable[..., Tensor] = nn.functional.linear,
    ) -> HeadCall:
        device_type = hidden_states.device.type
        autocast_dtype = (
            torch.get_autocast_dtype(device_type)
            if torch.is_autocast_enabled(device_type)
            else None
        )
        stored = weight if isinstance(weight, Tensor) else weight.stored
        return cls(
            hidden_states,
            weight,
            bias,
            product,
            torch.is_grad_enabled(),
            autocast_dtype,
            tuple(state_of(t) for t in (hidden_states, stored, bias)),
            owner,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_states.dtype if self.autocast_dtype is None else self.autocast_dtype

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The arguments of ``product``."""
        if isinstance(self.weight, Tensor):
            return self.hidden_states, self.weight, self.bias
        return (self.hidden_states,)

    def compute(self, *tensors: Any) -> Tensor:
        """The product in the autocast state of the call."""
        enabled = self.autocast_dtype is not None
        device_type = self.hidden_states.device.type
        with torch.autocast(device_type, dtype=self.autocast_dtype, enabled=enabled):
            return self.product(*tensors)

    def logits(self) -> Tensor:
        """The real logits, in the grad mode and the autocast state of the call."""
        self.check_unchanged()
        with torch.set_grad_enabled(self.grad_enabled):
            return self.compute(*self.tensors)

    def changed(self) -> str | None:
        """What the logits are computed from and has changed since, or None."""
        stored = self.weight
        if not isinstance(stored, Tensor):
            if not stored.is_current():
                return "head's weight"
            stored = stored.stored
        tensors = {
            "hidden states": self.hidden_states,
            "head's weight": stored,
            "head's bias": self.bias,
        }
        for (name, tensor), state in zip(tensors.items(), self.states, strict=True):
            if tensor is None:
                continue
            if state_of(tensor) != state or tensor.untyped_storage().size() == 0 < tensor.numel():
                return name
        return None

    def check_unchanged(self) -> None:
        """Raise RuntimeError if what the logits are computed from has changed since."""
        name = self.changed()
        if name is not None:
            raise RuntimeError(
                f"outputs.logits are computed when they are first read, but the {name} changed "
                "since the forward pass (an optimizer step, or sharding that freed them): "
                "read outputs.logits before that, or set LIGER_PATCH_RETURN_LOGITS=1 to "
                "compute them in every forward pass"
            )
