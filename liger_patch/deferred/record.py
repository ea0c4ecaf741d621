"""What deferred logits record: one product of the head, and the steps since, as a chain of tensors.

The record keeps the state of each input of the product. If an input has changed since, computing
the logits is an error.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from liger_patch.deferred.engines import in_process_group, is_partitioned, stored_parameter
from liger_patch.kernels.backend import autocast_dtype, autocast_to
from liger_patch.kernels.graphs import runs_eagerly


class Owner(Protocol):
    """The forward pass that deferred logits belong to: what is used here of
    ``patch.loss.ForwardPass``.
    """

    head_defers: bool | None
    widens: bool

    @property
    def chunk_mib(self) -> float | None: ...

    def note_read(self, operation: str) -> None: ...

    def cross_entropy(self, input: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor: ...


@dataclass
class Head:
    """The head of a model during one forward pass.

    Attributes:
        model: the patched model.
        module: its output embedding.
        owner: the forward pass.
    """

    model: nn.Module
    module: nn.Module
    owner: Owner

    @functools.cached_property
    def merged(self) -> tuple[tuple[list[str], tuple[str, ...]], ...]:
        """Return PEFT's lists of the adapters that are merged into the head's weight, each with a
        copy of what it held at the head's first product.

        Not of what it held when the head was called: PEFT may unmerge adapters in between.
        """
        if "peft" not in sys.modules:
            return ()
        from liger_patch.readers.lora_adapters import merged_adapters

        model: Any = self.model
        # a tied weight is the input embedding's too
        lists = merged_adapters(self.module, model.get_input_embeddings())
        return tuple((names, tuple(names)) for names in lists)


class HeadCall(NamedTuple):
    """One product of the head: its inputs, the state it was made in, and its owner.

    Attributes:
        shape: (V, H) of the weight, noted here because engines may free the weight.
        product: computes the real logits from hidden states, weight and bias.
        stored: the parameters behind weight and bias that the optimizer changes.
        states: ``_state_of`` hidden states, weight and bias when the product was made.
        steps: what optimizers have changed of ``stored`` since.
        merged: ``Head.merged`` at that time.
        owner: the forward pass.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None
    shape: tuple[int, int]
    product: Callable[..., Tensor]
    grad_enabled: bool
    autocast_dtype: torch.dtype | None
    stored: tuple[Tensor, Tensor | None]
    states: tuple[Any, ...]
    steps: _Steps
    merged: tuple[tuple[list[str], tuple[str, ...]], ...]
    owner: Owner

    @classmethod
    def of(
        cls,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        *,
        product: Callable[..., Tensor] = nn.functional.linear,
    ) -> HeadCall:
        vocab_size, hidden_size = weight.shape
        stored = weight, bias
        if in_process_group():
            stored = (
                stored_parameter(weight, head.model),
                None if bias is None else stored_parameter(bias, head.model),
            )
        return cls(
            hidden_states,
            weight,
            bias,
            (vocab_size, hidden_size),
            product,
            torch.is_grad_enabled(),
            autocast_dtype(hidden_states.device.type),
            stored,
            (_state_of(hidden_states), *map(_state_of, stored)),
            _Steps(stored),
            head.merged,
            head.owner,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_states.dtype if self.autocast_dtype is None else self.autocast_dtype

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the arguments of ``product``."""
        return self.hidden_states, self.weight, self.bias

    def compute(self, *tensors: Any) -> Tensor:
        """Compute the product in the autocast state of the call."""
        with autocast_to(self.hidden_states.device.type, self.autocast_dtype):
            return self.product(*tensors)

    def logits(self) -> Tensor:
        """Compute the real logits, in the grad mode and the autocast state of the call."""
        self.check_unchanged()
        with torch.set_grad_enabled(self.grad_enabled):
            return self.compute(*self.tensors)

    @runs_eagerly
    def why_outdated(self) -> str | None:
        """Say why the logits of this call can no longer be computed; None where they can."""
        late = "outputs.logits are computed lazily, but"
        advice = "or set LIGER_PATCH_RETURN_LOGITS=1 to compute them in every forward pass"
        # a DTensor has no memory of its own
        local: Tensor | None = getattr(self.weight, "_local_tensor", None)
        numbers = math.prod(self.shape) if local is None else local.numel()
        if (self.weight if local is None else local).untyped_storage().size() == 0 < numbers:
            return (
                f"{late} the head's weight was freed since the forward pass (by FSDP). Read them "
                "before that, or first call unshard() of the module given to fully_shard, on every "
                f"rank, {advice}"
            )
        changes = []
        if any(tuple(adapters) != before for adapters, before in self.merged):
            changes.append("an adapter was merged into the head's weight, or unmerged,")
        names = "the hidden states", "the head's weight", "the head's bias"
        tensors = self.hidden_states, *self.stored
        for name, tensor, state in zip(names, tensors, self.states, strict=True):
            if _state_of(tensor) != state or id(tensor) in self.steps.changed:
                changes.append(f"{name} changed")
        if not changes:
            return None
        return (
            f"{late} {changes[0]} since the forward pass. Read them before that (before the "
            f"optimizer's step), {advice}"
        )

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the logits of this call can no longer be computed."""
        why = self.why_outdated()
        if why is not None:
            raise RuntimeError(why)


def _state_of(tensor: Tensor | None) -> tuple[int | None, int, torch.dtype] | None:
    """Return what differs later if a tensor has changed: PyTorch's count of writes in place, and
    address and dtype of its data, which differ if ``tensor.data`` was set. A write through
    ``tensor.data`` alone is not seen.
    """
    if tensor is None:
        return None
    local = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
    version = None if local.is_inference() else local._version
    # ZeRO-3 sets the data of a parameter at each gathering
    has_address = not (is_partitioned(tensor) or isinstance(local, FakeTensor))
    address = local.data_ptr() if has_address else 0
    return version, address, tensor.dtype


class _Steps:
    """The optimizers' steps since one product of the head. Fused optimizers, and those of
    bitsandbytes, write without counting.

    It holds the parameters, as the product does. No weak reference to them is made: PyTorch cannot
    move (``model.to``) a DTensor that has one.

    Attributes:
        changed: the ids of the parameters that optimizers have changed.
    """

    def __init__(self, tensors: tuple[Tensor | None, ...]) -> None:
        self.parameters = [t for t in tensors if isinstance(t, nn.Parameter) and t.requires_grad]
        self.changed: set[int] = set()
        if self.parameters:
            _watch_optimizers()
            with _ONE_AT_A_TIME:
                _watching.add(self)


_ONE_AT_A_TIME = threading.Lock()
_watching: WeakSet[_Steps] = WeakSet()  # as many as there are outputs


@functools.cache
def _watch_optimizers() -> None:
    """Note the steps of optimizers from now on: called for the first product of a parameter."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with _ONE_AT_A_TIME:
        watching = list(_watching)
    if not watching:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for steps in watching:
        for each in steps.parameters:
            # DeepSpeed's optimizers hold copies, from which they write weights
            has_copies = hasattr(each, "_hp_mapping") or is_partitioned(each)
            if id(each) in held or has_copies:
                steps.changed.add(id(each))


class Step(NamedTuple):
    """One recorded operation on logits (..., V).

    Attributes:
        kind: "scale", "add", "tanh", "cast", "move", "rows", "detach", "clone" or "layout" (on
            the ranks of a group).
        function: the operation. It takes real logits, for "add" the real values of ``other``, then
            ``arguments``. That of "rows" leaves the last dimension whole, so it applies to hidden
            states as well.
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
        return self.function(*tensors, *self.arguments)


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
