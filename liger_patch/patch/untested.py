"""A model whose architecture has no row in the registry: compare its own loss with the fused one.

The fused loss is that of the model's own code by construction (see docs/design.md), so this
comparison should always agree. It runs once, at the first call with labels: the model's own forward
and the patched one, without gradients, from the same random numbers. ``patch.verify`` compares
gradients on a slice, at the first training step.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from liger_patch.deferred.engines import in_process_group
from liger_patch.kernels.graphs import runs_eagerly
from liger_patch.patch.settings import PatchRecord

ROUNDINGS = 32  # eps of float32 that are allowed: both losses are sums in float32
PER_TOKEN = 4.0  # times the rounding error of one token's loss that the mean may be off
SLICE = "loss and gradients of its first supervised tokens"  # what patch.verify compares
SMALL = 1 << 20  # numbers of a buffer that is put back: a larger one is a weight


@dataclass
class TrialRecord(PatchRecord):
    """The record of a forward pass that is only run to be compared. It gives no warnings.

    Attributes:
        rounding: the error of one token's loss that rounding the logits causes, relative to the
            mean loss.
    """

    rounding: float = 0.0

    def fall_back(self, reason: str) -> None:
        """Note that the loss is not fused, and why."""
        self.fused, self.reason = False, reason


@runs_eagerly
def compare_losses(
    model: PreTrainedModel,
    record: PatchRecord,
    own: Callable[..., Any],
    fused: Callable[[TrialRecord, tuple, dict[str, Any]], Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> None:
    """Compare the loss of the model's own forward with the fused one; the record has the result.

    Args:
        own: runs the model's own forward.
        fused: runs the patched forward for a record, with the options of Transformers' loss only.
        args, kwargs: those of the call. Each of the two forward passes gets a copy.
    """

    def run_own() -> Any:
        own_args, own_kwargs = _copied(args, kwargs)
        return own(*own_args, **own_kwargs)

    if _may_change((args, kwargs)):
        record.compared = f"{SLICE}, but not its own loss, as an argument may change in a call"
        return
    if (
        in_process_group() and distributed.get_world_size() > 1
    ):  # where other processes may not run the same forward passes
        record.compared = f"{SLICE}, but not its own loss, in a process group"
        return
    trial = TrialRecord(type(record.settings)(chunk_mib=record.chunk_mib))
    try:
        expected = _loss_of(model, run_own)
        if expected is None:
            record.compared = f"{SLICE}, but not its own loss, which its outputs do not hold"
            return
        if not torch.isfinite(expected):
            return  # no supervised token, say: compare the next call
        try:
            found = _loss_of(model, lambda: fused(trial, *_copied(args, kwargs)))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            record.distrusted = f"with deferred logits, it raises {type(error).__name__}: {error}"
            return
        if not trial.fused or found is None:
            record.distrusted = trial.reason or "its outputs hold no loss"
            return
        off, loss = abs(found.double() - expected.double()).item(), expected.item()
        allowed = ROUNDINGS * torch.finfo(torch.float32).eps + PER_TOKEN * trial.rounding
        allowed += torch.finfo(expected.dtype).eps  # of a loss that the model computes in 16 bits
        if off <= allowed * abs(loss):
            record.compared = (
                f"its own loss ({loss:.6g}) with the fused one ({found.item():.6g}), and {SLICE}"
            )
            return
        again = _loss_of(model, run_own)
        if again is None or abs(again.double() - expected.double()).item() > allowed * abs(loss):
            record.distrusted = f"its own loss changes from call to call ({loss:.6g}, {again})"
        else:
            record.distrusted = f"its own loss is {loss:.6g}, the fused one {found.item():.6g}"
            record.differs = True
    except torch.OutOfMemoryError:
        record.compared = f"{SLICE}, but not its own loss, whose logits did not fit in memory"


def _may_change(arguments: object) -> bool:
    """Return whether a forward pass may change what it is given, as it does a cache."""
    leaves = (each for each in tree_leaves(arguments) if each is not None)
    return not all(isinstance(each, (Tensor, Number, str)) for each in leaves)


def _copied(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return arguments whose tensors a forward pass may write to."""
    return tree_map_only(Tensor, Tensor.clone, (args, kwargs))


def _loss_of(model: PreTrainedModel, forward: Callable[[], Any]) -> Tensor | None:
    """Return the loss of a forward pass that leaves nothing behind, or None where it has none: what
    a mapping or an object names "loss", or the first of a tuple.
    """
    try:
        with torch.no_grad(), _same_random_numbers(model), _same_state(model):
            outputs = forward()
    finally:
        torch.clear_autocast_cache()  # torch 2.6 keeps casts that were made without gradients
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    else:
        loss = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        return None
    return loss.reshape(())


@contextmanager
def _same_random_numbers(model: PreTrainedModel) -> Iterator[None]:
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), None if numpy is None else numpy.random.get_state()
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kind = next((device.type for device in devices), "cuda")
    indices = [device.index for device in devices if device.index is not None]
    try:
        with torch.random.fork_rng(indices, device_type=kind):
            yield
    finally:
        random.setstate(before[0])
        if numpy is not None:
            numpy.random.set_state(before[1])


@contextmanager
def _same_state(model: PreTrainedModel) -> Iterator[None]:
    """Put back what a forward pass changes in its modules: running statistics, counters."""
    buffers = [b for b in model.buffers() if b.numel() <= SMALL and not b.is_meta]
    before = [(b, b._version, b.clone()) for b in buffers]
    modules = list(model.modules())
    names = [dict(module._buffers) for module in modules]
    numbers = [_numbers_of(module) for module in modules]
    try:
        yield
    finally:
        for buffer, version, values in before:
            if buffer._version != version:
                buffer.copy_(values)
        for module, own_buffers, own_numbers in zip(modules, names, numbers, strict=True):
            module._buffers.update(own_buffers)
            for name in _numbers_of(module).keys() - own_numbers.keys():
                del vars(module)[name]  # the class has its own
            vars(module).update(own_numbers)


def _numbers_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Number)}
