"""One product of the output embedding, made in a forward pass and computed when it is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from liger_patch.deferred.changes import State, state_of
from liger_patch.deferred.sharding import stored_parameter
from liger_patch.kernels.compilation import runs_eagerly
from liger_patch.kernels.head.inputs import QuantizedWeight


class Owner(Protocol):
    """The forward pass that deferred logits belong to."""

    def note_read(self, operation: str) -> None:
        """Take note that the named operation needs the values of the logits, or their gradient."""
        ...


@dataclass(frozen=True)
class HeadCall:
    """One product of the output embedding: its inputs, the state it was made in, and its owner.

    Attributes:
        shape: (V, H) of the weight, which engines may free.
        product: the real logits of hidden states, weight and bias; where the weight is quantised,
            of hidden states alone.
        stored: the parameters of the optimizer behind weight and bias.
        states: of hidden states, weight and bias.
        merged: PEFT's lists of the adapters that are merged into the weight, and what they held.
    """

    hidden_states: Tensor
    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    shape: tuple[int, int]
    product: Callable[..., Tensor]
    grad_enabled: bool
    autocast_dtype: torch.dtype | None
    stored: tuple[Tensor, Tensor | None]
    states: tuple[State | None, ...]
    merged: tuple[tuple[list[str], tuple[str, ...]], ...]
    owner: Owner

    @classmethod
    @runs_eagerly
    def of(
        cls,
        hidden_states: Tensor,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        model: nn.Module,
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
        vocab_size, hidden_size = weight.shape
        stored = (
            stored_parameter(weight, model) if isinstance(weight, Tensor) else weight.stored,
            None if bias is None else stored_parameter(bias, model),
        )
        return cls(
            hidden_states,
            weight,
            bias,
            (vocab_size, hidden_size),
            product,
            torch.is_grad_enabled(),
            autocast_dtype,
            stored,
            tuple(state_of(each) for each in (hidden_states, *stored)),
            tuple((names, tuple(names)) for names in _merged_adapters(model)),
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
        """What has changed since, so that other logits would be computed; None for nothing."""
        if any(tuple(names) != before for names, before in self.merged):
            return "an adapter was merged into the head's weight, or unmerged,"
        is_current = isinstance(self.weight, Tensor) or self.weight.is_current()
        names = "the hidden states", "the head's weight", "the head's bias"
        tensors = self.hidden_states, *self.stored
        for name, tensor, state in zip(names, tensors, self.states, strict=True):
            if state_of(tensor) != state or (name == "the head's weight" and not is_current):
                return f"{name} changed"
        return None

    def freed(self) -> bool:
        """Whether an engine that shards the head has freed its weight since."""
        if not isinstance(self.weight, Tensor):
            return False
        return self.weight.untyped_storage().size() == 0 < self.shape[0] * self.shape[1]

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the logits of this call can no longer be computed."""
        late = "outputs.logits are computed when they are first read, but"
        advice = "or set LIGER_PATCH_RETURN_LOGITS=1 to compute them in every forward pass"
        if self.freed():
            raise RuntimeError(
                f"{late} the head's weight was freed since the forward pass (by FSDP): read them "
                "before that, or gather it again on every rank (unshard() of the module that "
                f"fully_shard was given) and read them then, {advice}"
            )
        change = self.changed()
        if change is not None:
            raise RuntimeError(
                f"{late} {change} since the forward pass: read them before that (before the "
                f"optimizer's step), {advice}"
            )


def _merged_adapters(model: Any) -> tuple[list[str], ...]:
    if "peft" not in sys.modules:
        return ()
    from liger_patch.integrations.peft import merged_adapters

    # a tied weight is the input embedding's too
    return merged_adapters(model.get_output_embeddings(), model.get_input_embeddings())
