"""Compare a fused loss with the model's own, at the first call of an architecture without a row in
the registry. It finds code that does something else with deferred logits. By construction (see
docs/design.md) there is none.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Number
from typing import Any

import torch
from torch import Tensor, distributed
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from liger_patch.deferred.engines import in_process_group
from liger_patch.deferred.fuse import HeadProduct
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.deferred.tensor_parallel import is_dtensor
from liger_patch.kernels import reference
from liger_patch.patch.settings import PatchRecord, TrialRecord

TOKENS = 256  # of the slice: its float32 logits take 256 MiB at a vocabulary of 262144
LOSS_ROUNDINGS = 32  # eps of float32 between two sums of all losses
TOKEN_ROUNDINGS = 4  # of logits and of a token's loss, that is near 0 perhaps
SMALL = 1 << 20  # numbers of a buffer that is put back: a larger one is a weight


def note_rounding(
    record: PatchRecord,
    logits: DeferredLogits,  # (N, V)
    product: HeadProduct,
    labels: Tensor,  # (N,)
    *,
    ignore_index: int = -100,
    **_: Any,
) -> None:
    """Note in the record of a trial what one rounding may do to the mean loss of a slice: an eps of
    float32, to which losses cast their logits, and of each logit the eps of the narrowest dtype
    that it has had.
    """
    if not isinstance(record, TrialRecord) or is_dtensor(product.weight):
        return
    chosen = (labels != ignore_index).nonzero()[:TOKENS, 0]
    if len(chosen) == 0:
        return

    def rows(states: Tensor) -> Tensor:
        return states.reshape(-1, states.shape[-1])[chosen]

    low_rank = product.low_rank and (rows(product.low_rank[0]), product.low_rank[1])
    head = rows(product.hidden_states), product.weight, product.bias, low_rank
    dtypes = {torch.float32, logits.head_call.dtype}
    dtypes.update(step.dtype for step in logits.recorded_steps() or () if step.dtype is not None)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    with torch.no_grad(), torch.autocast(product.weight.device.type, enabled=False):
        z = reference.head_logits(*head)
        z = reference.scaled_and_capped(z, product.logit_scale, product.softcap)
    dlogits = z.softmax(-1).scatter_add(-1, labels[chosen, None], -torch.ones_like(z[:, :1]))
    rounding = torch.finfo(torch.float32).eps + eps * (dlogits * z).abs().sum(-1).mean().item()
    record.rounding = max(record.rounding, rounding)


def compare_losses(
    model: PreTrainedModel,
    record: PatchRecord,
    forward: Callable[[TrialRecord, tuple, dict[str, Any]], Any],
    args: tuple,
    kwargs: dict[str, Any],
) -> None:
    """Compare the loss of the model's own code with the fused one. The record has the result, and a
    warning says it.

    Both are those of a head in a wider dtype, so that they differ by roundings of float32 alone: a
    loss that the model computes in 16 bits may be less exact than the fused one.

    Args:
        forward: runs the model's forward for a record, with the options of Transformers' loss only.
        args, kwargs: those of the call. Each of the forward passes gets a copy.
    """

    def loss_of(trial: TrialRecord) -> Tensor | Exception | None:
        try:
            return _loss_of(model, lambda: forward(trial, *_copied(args, kwargs)))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # an error of the call itself is raised by the call too
            return error

    settings = type(record.settings)(chunk_mib=record.chunk_mib)
    own, trial = TrialRecord(settings, defers=False), TrialRecord(settings)
    why = None
    if _may_change((args, kwargs)):
        why = "as an argument may change in a call"
    elif in_process_group() and distributed.get_world_size() > 1:
        why = "in a process group"  # where others may not run the same forward passes
    try:
        expected = None if why else loss_of(own)
        if isinstance(expected, Exception):
            error = f"{type(expected).__name__}: {expected}"
            why = f"which raises without gradients or with logits in a wider dtype: {error}"
        if not isinstance(expected, Tensor):
            _note(record, why or "which its outputs do not hold")
            return
        if not torch.isfinite(expected):
            return  # no supervised token, say: compare the next call
        found = loss_of(trial)
        if isinstance(found, Exception):
            record.distrusted = f"with deferred logits, it raises {type(found).__name__}: {found}"
            return
        if not trial.fused or found is None:
            record.distrusted = trial.reason or "its outputs hold no loss"
            return
        allowed = LOSS_ROUNDINGS * torch.finfo(torch.float32).eps
        # half an eps of each token's loss, of the own and of the fused, where these have 16 bits
        allowed += 2 * torch.finfo(expected.dtype).eps
        allowed = allowed * expected.abs().double() + TOKEN_ROUNDINGS * trial.rounding
        losses = f"({expected.item():.6g}) with the fused one ({found.item():.6g})"
        if (expected.double() - found.double()).abs() <= allowed:
            record.compared, record.verified = f"its own loss {losses}", True
            _note(record)
            return
        record.distrusted = f"its own loss is {expected:.6g}, the fused one {found.item():.6g}"
        record.differs = True
    except torch.OutOfMemoryError:
        _note(record, "whose logits did not fit in memory")


def _note(record: PatchRecord, why_not: str | None = None) -> None:
    """Warn that the losses agree, or why they were not compared."""
    record.compared = record.compared or why_not
    found = f"It compared {record.compared}: they agree, and the loss is fused"
    if why_not is not None:
        found = f"The fused loss was not compared with the model's own, {why_not}"
    warnings.warn(f"liger_patch has no test of {record.architecture}. {found}", stacklevel=2)


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
    """Put back what a forward pass changes in its modules: running statistics, counters, and hooks
    that remove themselves. Where it adds hooks, they and all counters stay: something says that
    they are there, and would not add them again.
    """
    buffers = [b for b in model.buffers() if b.numel() <= SMALL and not b.is_meta]
    before = [(b, b._version, b.clone()) for b in buffers]
    modules = list(model.modules())
    names = [dict(module._buffers) for module in modules]
    states = [dict(vars(module)) for module in modules]
    items = [item for state in states for item in state.items()]
    held = [value for name, value in items if "_hooks" in name and isinstance(value, dict)]
    hooks = [(each, dict(each)) for each in held]
    try:
        yield
    finally:
        adds = any(each.keys() - own_hooks.keys() for each, own_hooks in hooks)
        for buffer, version, values in before:
            if buffer._version != version:
                buffer.copy_(values)
        for module, own_buffers, state in zip(modules, names, states, strict=True):
            module._buffers.update(own_buffers)
            now = vars(module)
            for name in () if adds else now.keys() | state.keys():
                if not any(isinstance(each.get(name), Number) for each in (now, state)):
                    continue
                if name in state:
                    now[name] = state[name]
                else:  # the class has its own
                    del now[name]
        for each, own_hooks in () if adds else hooks:
            each.clear()
            each.update(own_hooks)
