"""Compare the fused loss and gradients with the ordinary path, on a slice of a batch: for
LIGER_PATCH_VERIFY, and for architectures without a row in the registry.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn

from liger_patch.deferred.fuse import Parts
from liger_patch.deferred.tensor import no_hooks_of_saved_tensors
from liger_patch.deferred.tensor_parallel import (
    distributed_product,
    is_dtensor,
    local_tensor,
    own_rows,
)
from liger_patch.kernels import reference
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.head.odds_inputs import is_worth_odds
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.options import LossOptions
from liger_patch.patch import flags
from liger_patch.patch.settings import PatchRecord
from liger_patch.patch.untested import SLICE, TrialRecord

TOKENS = 256  # of the slice: its float32 logits take 256 MiB at a vocabulary of 262144
EAGER_ERRORS = 2.0  # times the ordinary path's own error that are allowed
ROUNDINGS = 8  # eps of the largest value that are allowed beside that: sums differ by their order

Loss = Callable[[HeadInputs], Tensor]


class NotComparable(Exception):
    """A batch has no supervised token, or its ordinary loss or gradients are not finite."""


def is_trusted(record: PatchRecord, parts: Parts, labels: Tensor, **options: Any) -> bool:
    """Return whether a model's fused loss is to be trusted; the record has what was found.

    With LIGER_PATCH_VERIFY=1, or for an architecture without a row in the registry, the first
    training step with supervised tokens and finite values compares it with the ordinary path.

    Args:
        record: that of the model.
        parts: what the logits (N, V) are made of.
        labels: (N,).
        options: of the loss, as ``disagreement`` takes them.
    """
    if isinstance(record, TrialRecord):
        record.rounding = max(record.rounding, loss_rounding(parts, labels, **options))
        return True
    wanted = flags.verify() or not record.tested
    if wanted and torch.is_grad_enabled() and not record.verified:
        try:
            difference = disagreement(parts, labels, **options)
        except NotComparable:  # the next batch may be
            return True
        except torch.OutOfMemoryError:
            if flags.verify() or is_dtensor(parts.weight):
                raise  # other ranks wait for this one
            # no option has asked for the comparison, and without it the step may fit
            own, has_own, _ = (record.compared or "").partition(f", and {SLICE}")
            compared = f"{own}, but no gradients" if has_own else "nothing"
            difference, record.compared = None, f"{compared}, as memory was short"
        record.verified = True
        if difference is not None:
            by = "LIGER_PATCH_VERIFY" if flags.verify() else "the first training step"
            record.distrusted, record.differs = f"{by} {difference}", True
        elif not record.tested:
            _say_what_was_compared(record)
    return record.distrusted is None


def _say_what_was_compared(record: PatchRecord) -> None:
    record.compared = record.compared or SLICE
    warnings.warn(
        f"liger_patch has no test of {record.architecture}. It compared {record.compared}: they "
        "agree, and the loss is fused",
        stacklevel=3,
    )


def disagreement(
    parts: Parts,
    labels: Tensor,  # (N,)
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    **reduced: Any,
) -> str | None:
    """Return what differs between the fused and ordinary loss and gradients of a slice, or None.

    The truth is the ordinary computation in float32 (float64 for float32 inputs). The error of the
    fused results may be EAGER_ERRORS times the error of the ordinary computation in the model's own
    dtype, plus ROUNDINGS eps of the largest value.

    The loss is the mean over the slice, whatever ``reduced`` (reduction and denominator) says. The
    comparison needs two copies of the head's weight in the wider dtype. If the vocabulary is
    distributed, these are of this rank's rows, every rank must call this function, and all ranks
    get the same answer.

    Raises:
        NotComparable: another batch has to be compared.
    """
    # the kernels that the whole batch runs, not those of a small one
    hopper_kernels = is_worth_odds(len(labels)) or None
    inputs, labels = _slice(parts, labels, ignore_index)
    if len(labels) == 0:
        raise NotComparable
    options = LossOptions(
        ignore_index, parts.softcap, parts.logit_scale, label_smoothing, z_loss, class_weight
    )

    def fused(inputs: HeadInputs) -> Tensor:
        weight, bias, shard = inputs.weight, inputs.bias, None
        if is_dtensor(weight):
            weight, bias, shard = own_rows(weight, bias)
        return linear_cross_entropy(
            inputs.hidden_states,
            weight,
            labels,
            bias=bias,
            vocab_shard=shard,
            low_rank=_pair(inputs),
            ignore_index=ignore_index,
            softcap=parts.softcap,
            logit_scale=parts.logit_scale,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            class_weight=class_weight,
            hopper_kernels=hopper_kernels,
        )

    def ordinary(inputs: HeadInputs) -> Tensor:
        if is_dtensor(inputs.weight):
            logits = distributed_product(inputs.hidden_states, inputs.weight, inputs.bias)
            return reference.cross_entropy(logits.full_tensor(), labels, options=options)
        return reference.linear_cross_entropy(
            inputs.hidden_states,
            _plain_weight(inputs),
            labels,
            bias=inputs.bias,
            low_rank=_pair(inputs),
            options=options,
        )

    dtype, wide = _dtypes(parts)
    truth = _loss_and_gradients(ordinary, inputs, wide)
    eager = _loss_and_gradients(ordinary, inputs, dtype)
    ours = _loss_and_gradients(fused, inputs, dtype)
    rounding = ROUNDINGS * torch.finfo(dtype).eps
    for name, value in truth.items():
        off, eager_off, largest = _largest(
            [ours[name] - value, eager[name] - value, value], parts.weight
        )
        allowed = EAGER_ERRORS * eager_off + rounding * largest
        if not math.isfinite(allowed):
            raise NotComparable
        if not off <= allowed:
            return (
                f"found a difference on the first {len(labels)} supervised tokens. "
                f"The fused {name} is off by {off:.3g}, the ordinary one by "
                f"{eager_off:.3g} (allowed: {allowed:.3g})"
            )
    return None


def loss_rounding(parts: Parts, labels: Tensor, *, ignore_index: int = -100, **_: Any) -> float:
    """Return how far rounding the logits moves the ordinary loss of a token, relative to the mean
    loss: the root mean square over a slice. 0 of a head whose vocabulary is distributed.
    """
    if is_dtensor(parts.weight):
        return 0.0
    inputs, labels = _slice(parts, labels, ignore_index)
    if len(labels) == 0:
        return 0.0
    dtype, wide = _dtypes(parts)

    def losses(dtype: torch.dtype) -> Tensor:
        given = inputs.to(dtype)
        z = nn.functional.linear(given.hidden_states, _plain_weight(given), given.bias)
        pair = _pair(given)
        z = parts.logit_scale * (z if pair is None else z + nn.functional.linear(*pair))
        if parts.softcap is not None:
            z = parts.softcap * torch.tanh(z / parts.softcap)
        return nn.functional.cross_entropy(z.to(wide), labels, reduction="none")

    with torch.no_grad(), torch.autocast(labels.device.type, enabled=False):
        truth = losses(wide)
        return ((losses(dtype) - truth).square().mean().sqrt() / truth.mean().abs()).item()


def _slice(parts: Parts, labels: Tensor, ignore_index: int) -> tuple[HeadInputs, Tensor]:
    """Return the first supervised tokens of a batch, as the operator takes them."""
    chosen = (labels != ignore_index).nonzero()[:TOKENS, 0]

    def rows(states: Tensor) -> Tensor:
        return states.reshape(-1, states.shape[-1])[chosen]

    low_rank = () if parts.low_rank is None else (rows(parts.low_rank[0]), parts.low_rank[1])
    inputs = HeadInputs(rows(parts.hidden_states), parts.weight, parts.bias, *low_rank)
    return inputs, labels[chosen]


def _dtypes(parts: Parts) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of the products, and the one of the truth."""
    dtype = parts.autocast_dtype or parts.weight.dtype
    return dtype, torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _plain_weight(inputs: HeadInputs) -> Tensor:
    if isinstance(inputs.weight, Tensor):
        return inputs.weight
    rows = inputs.weight.rows(0, inputs.weight.shape[0])
    return rows.to(inputs.hidden_states.dtype)


def _pair(inputs: HeadInputs) -> tuple[Tensor, Tensor] | None:
    if inputs.low_rank is None or inputs.low_rank_weight is None:
        return None
    return inputs.low_rank, inputs.low_rank_weight


def _loss_and_gradients(loss: Loss, inputs: HeadInputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute the loss and every gradient, by their names, in ``dtype``."""
    leaves = inputs.to(dtype)._asdict()
    wanted = {}
    for name, value in leaves.items():
        if isinstance(value, Tensor):
            leaves[name] = wanted[name] = value.detach().requires_grad_()
    without_autocast = torch.autocast(inputs.hidden_states.device.type, enabled=False)
    with torch.enable_grad(), no_hooks_of_saved_tensors(), without_autocast:
        value = loss(HeadInputs(**leaves))
        gradients = map(local_tensor, torch.autograd.grad(value, list(wanted.values())))
    names = [f"gradient of the {name.replace('_', ' ')}" for name in wanted]
    return {"loss": value.detach(), **dict(zip(names, gradients, strict=True))}


def _largest(tensors: list[Tensor], weight: Any) -> list[float]:
    """Return the largest absolute value of each, over the ranks that share the vocabulary."""
    values = [tensor.abs().max() if tensor.numel() else tensor.new_zeros(()) for tensor in tensors]
    largest = torch.stack(values)
    if is_dtensor(weight):
        distributed.all_reduce(
            largest, distributed.ReduceOp.MAX, group=weight.device_mesh.get_group()
        )
    return largest.tolist()
