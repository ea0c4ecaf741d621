"""Compare the fused loss and gradients of a slice of a batch with the ordinary ones, at the first
training step: for LIGER_PATCH_VERIFY. It finds a kernel that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    logits: DeferredLogits,
    product: HeadProduct,
    labels: Tensor,
    **options: Any,
) -> str | None:
    """Return what is wrong with a model's fused loss, None for nothing; the record keeps it.

    With LIGER_PATCH_VERIFY=1, the first training step with supervised tokens and finite values
    compares it with the ordinary path.

    Args:
        record: that of the model.
        logits: (N, V).
        product: what they are made of.
        labels: (N,).
        options: of the loss, as ``disagreement`` takes them.
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
    states, weight, bias = inputs[:3]
    assert isinstance(weight, Tensor)  # no head is quantized here
    return reference.head_logits(states, weight, bias, _pair(inputs))


def _final_logits(product: HeadProduct, inputs: HeadInputs) -> Tensor:
    """Return (n, V), what the softmax is taken of."""
    with torch.no_grad(), torch.autocast(inputs.hidden_states.device.type, enabled=False):
        return reference.scaled_and_capped(_logits(inputs), product.logit_scale, product.softcap)


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
        gradients = torch.autograd.grad(value, list(wanted.values()))
    names = [f"gradient of the {name.replace('_', ' ')}" for name in wanted]
    return {"loss": value.detach(), **dict(zip(names, gradients, strict=True))}


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
