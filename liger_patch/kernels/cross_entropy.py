"""Cross entropy of ready-made logits, by the rows' kernel. N: tokens, V: vocabulary."""

from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    accumulation_dtype,
    check_backward,
    check_plain_tensors,
    contiguous_features,
    without_autocast,
)
from liger_patch.kernels.graphs import constants, differentiable, operator, sees_operators
from liger_patch.kernels.head.labels import (
    check_token_arguments,
    compact_labels,
    token_factors,
    traced_items,
)
from liger_patch.kernels.head.logits import cross_entropy_rows
from liger_patch.kernels.options import LossOptions


def _cross_entropy_results(logits: Tensor, labels: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    *_, reduction, token_weight, num_items_in_batch = options
    _check(logits, labels, LossOptions(*options[:6]), reduction, token_weight, num_items_in_batch)
    factors = logits.new_empty(labels.shape, dtype=accumulation_dtype(logits.dtype))
    return factors.new_empty(labels.shape if reduction == "none" else ()), factors


@operator(_cross_entropy_results, reads_values=True)
def _cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    label_smoothing: float,
    z_loss: float,
    class_weight: Tensor | None,
    reduction: str,
    token_weight: Tensor | None,
    num_items_in_batch: Tensor | None,  # outside of graphs a number too
) -> tuple[Tensor, Tensor]:
    """Return the loss and (N,) the factors of the tokens' losses."""
    options = LossOptions(ignore_index, softcap, logit_scale, label_smoothing, z_loss, class_weight)
    _check(logits, labels, options, reduction, token_weight, num_items_in_batch)
    dtype = accumulation_dtype(logits.dtype)
    compacted = compact_labels(labels, logits.shape[1], ignore_index)
    factors = token_factors(
        labels,
        compacted,
        options,
        reduction=reduction,
        token_weight=token_weight,
        num_items_in_batch=num_items_in_batch,
        dtype=dtype,
    ).contiguous()
    compacted.read_count()  # for the check of the labels
    logits = contiguous_features(logits)
    with without_autocast(logits.device.type):  # a product on a CPU would round to 16 bits
        losses = cross_entropy_rows(logits, labels.to(torch.int64), options) * factors
    return losses if reduction == "none" else losses.sum(), factors


def _backward_results(grad_output: Tensor, logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@operator(_backward_results)
def _cross_entropy_backward(
    grad_output: Tensor,
    logits: Tensor,
    labels: Tensor,
    factors: Tensor,
    ignore_index: int,
    softcap: float | None,
    logit_scale: float,
    label_smoothing: float,
    z_loss: float,
    class_weight: Tensor | None,
) -> Tensor:
    options = LossOptions(ignore_index, softcap, logit_scale, label_smoothing, z_loss, class_weight)
    # hooks of saved tensors may have given the logits other strides
    logits, labels = contiguous_features(logits), labels.to(torch.int64)
    dlogits = _backward_results(grad_output, logits)
    row_scale = factors * grad_output
    cross_entropy_rows(logits, labels, options, dlogits=dlogits, row_scale=row_scale)
    return dlogits


def _save(ctx: Any, inputs: tuple, results: tuple[Tensor, Tensor]) -> None:
    logits, labels, *ctx.options, class_weight, _, _, _ = inputs
    ctx.save_for_backward(logits, labels, results[1], class_weight)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    check_backward("cross_entropy", grad_output)
    *tensors, class_weight = ctx.saved_tensors
    arguments: Any = (*tensors, *ctx.options, class_weight)
    dlogits = _cross_entropy_backward(grad_output, *arguments)
    return (dlogits, *[None] * 10)


_differentiable_cross_entropy = differentiable(_cross_entropy, _save, _backward, first_alone=True)


def cross_entropy(
    logits: Tensor,  # (N, V)
    labels: Tensor,  # (N,)
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,  # (V,)
    token_weight: Tensor | None = None,  # (N,)
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Compute ``torch.nn.functional.cross_entropy`` in float32, without a float32 copy of logits.

    In ``torch.compile``, ``torch.export``, ``make_fx`` and ``FakeTensorMode`` it is the operator
    ``liger_patch::cross_entropy``.

    Args:
        logits: (N, V), any floating dtype; left as they are. The backward pass allocates their
            gradient, and nothing else of that size.
        others: as in ``linear_cross_entropy``.

    Returns:
        () or, for "none", (N,) with 0 where ignored; float32, float64 for float64 logits.

    Where the mean of ``torch.nn.functional.cross_entropy`` is nan, this one is 0, with zero
    gradients: no tokens, labels that are all ignored, or weights of all labels that add up to 0,
    also with label smoothing and z-loss. The mean of the z-loss
    is divided as that of the cross entropy is: by the sum of the class weights of the labels, where
    there are any (Liger-Kernel divides by the number of tokens).

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit, a label outside the
            vocabulary.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    options = ignore_index, softcap, logit_scale, label_smoothing, z_loss, class_weight
    if sees_operators((logits,)):
        options, num_items_in_batch = constants(*options), traced_items(num_items_in_batch)
    how = reduction, token_weight, num_items_in_batch
    return _differentiable_cross_entropy(logits, labels, *options, *how)


def _check(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions,
    reduction: str,
    token_weight: Tensor | None,
    num_items_in_batch: Tensor | int | None,
) -> None:
    """Raise ValueError for what does not fit. Reads no values."""
    check_plain_tensors(
        logits=logits, labels=labels, class_weight=options.class_weight, token_weight=token_weight
    )
    if logits.dim() != 2 or not logits.shape[1] or not logits.is_floating_point():
        raise ValueError(
            "logits must be a floating-point (N, V) tensor, got "
            f"{logits.dtype} {tuple(logits.shape)}"
        )
    options.check(logits.shape[1], logits.device)
    check_token_arguments(
        labels,
        logits.shape[0],
        logits.device,
        reduction=reduction,
        token_weight=token_weight,
        num_items_in_batch=num_items_in_batch,
    )
