"""Compare a fused loss with the ordinary one.

- At the first call of an architecture without a row in the registry (``compare_losses``): the loss
  of a whole call with that of the model's own code. It finds code that does something else with
  deferred logits. By construction (see docs/design.md) there is none.
- For LIGER_PATCH_VERIFY (``why_distrusted``): loss and gradients of a slice of a batch, at the
  first training step. It finds a kernel that is wrong.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Number
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from liger_patch.deferred.engines import in_process_group
from liger_patch.deferred.fuse import HeadProduct
from liger_patch.deferred.tensor import DeferredLogits, no_hooks_of_saved_tensors
from liger_patch.deferred.tensor_parallel import is_dtensor
from liger_patch.kernels import reference
from liger_patch.kernels.backend import wider
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.head.odds import is_worth_odds
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.options import LossOptions
from liger_patch.patch import flags
from liger_patch.patch.settings import PatchRecord, TrialRecord

TOKENS = 256  # of the slice: its float32 logits take 256 MiB at a vocabulary of 262144
EAGER_ERRORS = 2.0  # times the ordinary path's own errors that are allowed
ROUNDINGS = 8  # eps of the largest value that are allowed beside that: sums differ by their order

Loss = Callable[[HeadInputs], Tensor]


class NotComparable(Exception):
    """A batch has no supervised token, or its ordinary loss or gradients are not finite."""


def why_distrusted(
    record: PatchRecord,
    logits: DeferredLogits,  # (N, V)
    product: HeadProduct,  # what they are made of
    labels: Tensor,  # (N,)
    **options: Any,  # of the loss, as ``disagreement`` takes them
) -> str | None:
    """Return what is wrong with a model's fused loss, None for nothing; the record keeps it.

    With LIGER_PATCH_VERIFY=1, the first training step with supervised tokens and finite values
    compares it with the ordinary path.
    """
    if isinstance(record, TrialRecord):
        record.rounding = max(record.rounding, _loss_rounding(logits, product, labels, **options))
        return None
    if flags.verify() and torch.is_grad_enabled() and not record.checked:
        if is_dtensor(product.weight):
            record.warn_once("does not verify a head whose vocabulary is distributed over ranks")
            return None
        try:
            difference = disagreement(product, labels, **options)
        except NotComparable:  # the next batch may be
            return None
        record.checked = True
        if difference is not None:
            record.distrusted, record.differs = f"LIGER_PATCH_VERIFY {difference}", True
    return record.distrusted


def disagreement(
    product: HeadProduct,
    labels: Tensor,  # (N,)
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    **reduced: Any,
) -> str | None:
    """Return what differs between the fused and ordinary loss and gradients of a slice, or None.

    The truth is the ordinary computation in a wider dtype; that of float64 is float64. The error of
    each fused result may be the sum of these:

    - EAGER_ERRORS times the error of the ordinary result in the model's own dtype. For float64,
      this is the error in float32, times the ratio of their eps;
    - ROUNDINGS eps of the largest value, and for the loss of the logits, in the dtype of its sums;
    - the smallest normal number;
    - the largest value times EAGER_ERRORS times the largest error of an ordinary logit. An error d
      of all logits changes each probability, and each loss, by a factor of up to exp(2 d). A result
      may be exact by luck, but not all logits are.

    The loss is the mean over the slice, whatever ``reduced`` (reduction and denominator) says. The
    comparison needs two copies of the head's weight in the wider dtype.

    Raises:
        NotComparable: another batch has to be compared.
    """
    # the kernels that the whole batch runs, not those of a small one
    hopper_kernels = is_worth_odds(len(labels)) or None
    inputs, labels = _slice(product, labels, ignore_index)
    if len(labels) == 0:
        raise NotComparable
    options = LossOptions(
        ignore_index, product.softcap, product.logit_scale, label_smoothing, z_loss, class_weight
    )

    def fused(inputs: HeadInputs) -> Tensor:
        return linear_cross_entropy(
            inputs.hidden_states,
            inputs.weight,
            labels,
            bias=inputs.bias,
            low_rank=_pair(inputs),
            hopper_kernels=hopper_kernels,
            **vars(options),
        )

    def ordinary(inputs: HeadInputs) -> Tensor:
        return reference.cross_entropy(_logits(inputs), labels, options=options)

    dtype = product.autocast_dtype or product.weight.dtype
    wide, narrow = wider(dtype), torch.float32 if dtype == torch.float64 else dtype
    eps = torch.finfo(dtype).eps
    truth = _loss_and_gradients(ordinary, inputs, wide)
    eager = _loss_and_gradients(ordinary, inputs, narrow)
    ours = _loss_and_gradients(fused, inputs, dtype)
    z = _final_logits(product, inputs.to(wide))
    z_off = (_final_logits(product, inputs.to(narrow)) - z).abs().max().item()
    eager_errors = EAGER_ERRORS * eps / torch.finfo(narrow).eps
    rounding = ROUNDINGS * eps + eager_errors * z_off
    loss_rounding = ROUNDINGS * torch.finfo(ours["loss"].dtype).eps * (1 + z.abs().max().item())
    for name, value in truth.items():
        tensors = ours[name] - value, eager[name] - value, value
        off, eager_off, largest = (_largest(each) for each in tensors)
        allowed = eager_errors * eager_off + rounding * largest + torch.finfo(dtype).tiny
        allowed += loss_rounding if name == "loss" else 0.0
        if not math.isfinite(allowed):
            raise NotComparable
        if not off <= allowed:
            return (
                f"found a difference on the first {len(labels)} supervised tokens. "
                f"The fused {name} is off by {off:.3g} (allowed: {allowed:.3g}), by up to "
                f"{largest:.3g}"
            )
    return None


def _loss_rounding(
    logits: DeferredLogits,  # (N, V)
    product: HeadProduct,
    labels: Tensor,  # (N,)
    *,
    ignore_index: int = -100,
    **_: Any,
) -> float:
    """Return what one rounding may do to the mean loss of a slice: an eps of float32, to which
    losses cast their logits, and of each logit the eps of the narrowest dtype that it has had.
    """
    inputs, labels = _slice(product, labels, ignore_index)
    if is_dtensor(product.weight) or len(labels) == 0:
        return 0.0
    dtypes = {torch.float32, logits.head_call.dtype}
    dtypes.update(step.dtype for step in logits.recorded_steps() or () if step.dtype is not None)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    z = _final_logits(product, inputs)
    dlogits = z.softmax(-1).scatter_add(-1, labels[:, None], -torch.ones_like(z[:, :1]))
    return torch.finfo(torch.float32).eps + eps * (dlogits * z).abs().sum(-1).mean().item()


def _slice(product: HeadProduct, labels: Tensor, ignore_index: int) -> tuple[HeadInputs, Tensor]:
    """Return the first supervised tokens of a batch, as the operator takes them."""
    chosen = (labels != ignore_index).nonzero()[:TOKENS, 0]

    def rows(states: Tensor) -> Tensor:
        return states.reshape(-1, states.shape[-1])[chosen]

    low_rank = () if product.low_rank is None else (rows(product.low_rank[0]), product.low_rank[1])
    inputs = HeadInputs(rows(product.hidden_states), product.weight, product.bias, *low_rank)
    return inputs, labels[chosen]


def _pair(inputs: HeadInputs) -> tuple[Tensor, Tensor] | None:
    if inputs.low_rank is None or inputs.low_rank_weight is None:
        return None
    return inputs.low_rank, inputs.low_rank_weight


def _logits(inputs: HeadInputs) -> Tensor:
    return reference.head_logits(*inputs[:3], _pair(inputs))


def _final_logits(product: HeadProduct, inputs: HeadInputs) -> Tensor:
    """Return (n, V), what the softmax is taken of."""
    with torch.no_grad(), torch.autocast(inputs.hidden_states.device.type, enabled=False):
        return reference.scaled_and_capped(_logits(inputs), product.logit_scale, product.softcap)


def _loss_and_gradients(loss: Loss, inputs: HeadInputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute the loss and every gradient, by their names, in ``dtype``."""
    leaves = inputs.to(dtype)._asdict()
    wanted = {}
    for name, value in leaves.items():
        if value is not None:
            leaves[name] = wanted[name] = value.detach().requires_grad_()
    without_autocast = torch.autocast(inputs.hidden_states.device.type, enabled=False)
    with torch.enable_grad(), no_hooks_of_saved_tensors(), without_autocast:
        value = loss(HeadInputs(**leaves))
        gradients = torch.autograd.grad(value, list(wanted.values()))
    names = [f"gradient of the {name.replace('_', ' ')}" for name in wanted]
    return {"loss": value.detach(), **dict(zip(names, gradients, strict=True))}


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


LOSS_ROUNDINGS = 32  # eps of float32 between two sums of all losses
TOKEN_ROUNDINGS = 4  # of logits and of a token's loss, that is near 0 perhaps
SMALL = 1 << 20  # numbers of a buffer that is put back: a larger one is a weight
HOOKS = (  # of the forward pass, and their options
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


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
    """Put back what a forward pass changes in its modules: running statistics, counters, hooks that
    remove themselves.
    """
    buffers = [b for b in model.buffers() if b.numel() <= SMALL and not b.is_meta]
    before = [(b, b._version, b.clone()) for b in buffers]
    modules = list(model.modules())
    names = [dict(module._buffers) for module in modules]
    numbers = [_numbers_of(module) for module in modules]
    held = [value for module in modules for name, value in vars(module).items() if name in HOOKS]
    hooks = [(each, dict(each)) for each in held if each]
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
        for each, own_hooks in hooks:
            each.clear()
            each.update(own_hooks)


def _numbers_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Number)}
