"""Deferred logits of a head whose vocabulary is distributed over ranks (tensor parallel).

The weight is a ``DTensor`` with its rows sharded: that of PyTorch's ``ColwiseParallel``, and of
Transformers' ``tp_plan``. Engines redistribute what such a head returns and take its local tensor;
both are recorded here. A fused loss multiplies each rank's own rows; reading the logits makes the
engine's own collectives, and so has to happen on every rank or on none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_patch.deferred.record import HeadCall, Step
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.kernels.head.inputs import VocabShard


class DistributedLogits(DeferredLogits):
    """Deferred logits in the place of a ``DTensor``, which ``isinstance`` takes them for.

    Attributes:
        device_mesh: of the weight; of one dimension.
        placements: of the logits on it.
    """

    device_mesh: Any
    placements: tuple[Any, ...]

    @property
    def __class__(self) -> type:
        from torch.distributed.tensor import DTensor

        return DTensor

    @classmethod
    def of_head(cls, call: HeadCall) -> DistributedLogits:
        from torch.distributed.tensor import Shard

        logits: Any = super().of_head(call)
        weight: Any = call.weight
        return logits._placed(weight.device_mesh, (Shard(logits.dim() - 1),))

    def _placed(self, device_mesh: Any, placements: tuple[Any, ...]) -> DistributedLogits:
        self.device_mesh, self.placements = device_mesh, placements
        return self

    def then(self, step: Step, **changes: Any) -> Tensor:
        result = super().then(step, **changes)
        if type(result) is DistributedLogits:
            result._placed(self.device_mesh, self.placements)
        return result

    def redistribute(
        self, device_mesh: Any = None, placements: Sequence[Any] | None = None, **options: Any
    ) -> Any:
        """Record ``DTensor.redistribute`` to all ranks, or to where the logits are."""
        asked, last = tuple(placements or ()), self.dim() - 1
        to_all = all(p.is_replicate() for p in asked)
        to_same = all(p.is_shard(last) or p.is_shard(-1) for p in (*asked, *self.placements))
        is_here = len(asked) == 1 and (device_mesh is None or device_mesh == self.device_mesh)
        if not (to_all or to_same) or not is_here or options.keys() - {"async_op"}:
            return self.read("redistribute").redistribute(device_mesh, placements, **options)  # pyright: ignore[reportAttributeAccessIssue]

        def apply(logits: Any) -> Any:
            return logits.redistribute(placements=asked, **options)

        result: Any = self.then(Step("layout", apply))
        return (
            result._placed(self.device_mesh, asked) if type(result) is DistributedLogits else result
        )

    def to_local(self, **options: Any) -> Any:
        """Record ``DTensor.to_local`` of logits that every rank has all of."""
        if options or not all(p.is_replicate() for p in self.placements):
            return self.read("to_local").to_local(**options)  # pyright: ignore[reportAttributeAccessIssue]
        return self.then(Step("layout", lambda logits: logits.to_local()), into=DeferredLogits)

    def full_tensor(self, **options: Any) -> Any:
        return self.read("full_tensor").full_tensor(**options)  # pyright: ignore[reportAttributeAccessIssue]

    def result(self, value: Tensor) -> Tensor:
        """Return a result of these logits, the same on every rank, as a ``DTensor``."""
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(value, self.device_mesh, [Replicate()], run_check=False)


def is_dtensor(tensor: object) -> bool:
    """Return whether this is a ``DTensor``, and no stand-in for one."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "_local_tensor")


def own_rows(weight: Any, bias: Any) -> tuple[Any, Any, VocabShard | None]:
    """Return this rank's rows of weight and bias, with autograd; plain ones themselves."""
    if not is_dtensor(weight):
        return weight, bias, None
    shard = VocabShard(weight.device_mesh.get_group(), weight.shape[0])
    return weight.to_local(), None if bias is None else bias.to_local(), shard


def local_tensor(tensor: Any) -> Any:
    """Return this rank's part of a ``DTensor``, without autograd; any other tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def distributed_inputs(
    hidden_states: Any, weight: Any, bias: Any, whole: tuple[Any, Any]
) -> tuple[Tensor, Any, Any] | None:
    """Return the plain hidden states, and weight and bias as ``DTensor``, of a head with rows on
    several ranks; None for what is no such head.

    Args:
        whole: weight and bias before the head's forward ran: for inference, Transformers puts their
            local tensors in their place.
    """
    if not is_dtensor(weight):
        if not is_dtensor(whole[0]) or not _is_same(weight, whole[0]._local_tensor):
            return None
        weight, bias = whole
    mesh = weight.device_mesh
    if not _has_own_rows(weight, mesh) or not (bias is None or _has_own_rows(bias, mesh)):
        return None
    if not is_dtensor(hidden_states):
        # one with a gradient: its engine takes care of that itself
        has_gradient = hidden_states.requires_grad and torch.is_grad_enabled()
        return None if has_gradient else (hidden_states, weight, bias)
    placements = hidden_states.placements
    if hidden_states.device_mesh != mesh or not all(p.is_replicate() for p in placements):
        return None
    # its gradient is summed over the ranks where it is computed
    hidden_states = hidden_states.to_local(grad_placements=placements)
    if hasattr(hidden_states, "trigger_wait"):
        hidden_states = _Waited.apply(hidden_states)
    return hidden_states, weight, bias


def distributed_product(hidden_states: Tensor, weight: Any, bias: Any = None) -> Any:
    """Compute the real logits as the engine does: a ``DTensor`` from plain hidden states."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh
    replicated = DTensor.from_local(hidden_states, mesh, [Replicate()], run_check=False)
    return nn.functional.linear(replicated, weight, bias)


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.data_ptr() == b.data_ptr()


def _has_own_rows(parameter: Any, mesh: Any) -> bool:
    from torch.distributed.tensor import Shard

    if not is_dtensor(parameter) or parameter.device_mesh != mesh or mesh.ndim != 1:
        return False
    (placement,) = parameter.placements
    return type(placement) is Shard and placement.dim == 0


class _Waited(torch.autograd.Function):
    """The tensor that a collective has been started for, once it is over."""

    @staticmethod
    def forward(ctx, tensor: Any) -> Tensor:
        return tensor.trigger_wait().view_as(tensor)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        return grad_output
