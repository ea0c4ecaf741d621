"""Cross entropy of ready-made logits: the rows' kernel behind an autograd function, and behind an
operator of ``torch.library`` for calls that become a part of a graph.

N: tokens, V: vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, check_backward, check_plain_tensors
from liger_patch.kernels.graphs import constants, define, is_traced, runs_eagerly
from liger_patch.kernels.head.labels import (
    check_token_arguments,
    compact_labels,
    token_factors,
    traced_items,
)
from liger_patch.kernels.head.logits import cross_entropy_rows
from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.rows import contiguous_features


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits: Tensor, labels: Tensor, factors: Tensor, options: LossOptions, reduction: str
    ) -> Tensor:
        logits = contiguous_features(logits)
        ctx.save_for_backward(logits, labels, factors, options.class_weight)
        ctx.options = options
        losses = cross_entropy_rows(logits, labels, options) * factors
        return losses if reduction == "none" else losses.sum()

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        check_backward("cross_entropy", grad_output)
        logits, labels, factors, class_weight = ctx.saved_tensors
        options = replace(ctx.options, class_weight=class_weight)
        # hooks of saved tensors may have given them other strides
        logits = contiguous_features(logits)
        dlogits = torch.empty_like(logits)
        cross_entropy_rows(
            logits, labels, options, dlogits=dlogits, row_scale=factors * grad_output
        )
        return dlogits, None, None, None, None


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

    Within ``torch.compile`` and the others that ``linear_cross_entropy`` names, it is the operator
    ``liger_patch::cross_entropy``.

    Args:
        logits: (N, V), any floating dtype; left as they are. The backward pass allocates their
            gradient, nothing else.
        labels: (N,) integers in [0, V), or ``ignore_index`` where a token is not supervised.
        reduction: "mean", "sum" or "none".
        softcap: logits become ``softcap * tanh(logits / softcap)``, after ``logit_scale``.
        label_smoothing: as in PyTorch, in [0, 1].
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` to each token's loss.
        class_weight: PyTorch's ``weight``.
        token_weight: factor on each token's loss; the mean is then the weighted mean.
        num_items_in_batch: denominator of the mean instead of the (weighted) number of supervised
            tokens; 0 counts as 1.

    Returns:
        () or, for "none", (N,) with 0 where ignored; float32, float64 for float64 logits.

    Differences from ``torch.nn.functional.cross_entropy``, whose mean is nan in these cases: it is
    0, with zero gradients, of an empty batch, of one whose labels are all ignored, and where the
    weights of all labels add up to 0, also with label smoothing and z-loss. The mean of the z-loss
    is divided as that of the cross entropy is: by the sum of the class weights of the labels, where
    there are any (Liger-Kernel divides by the number of tokens).

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit, a label outside the
            vocabulary.
    """
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "softcap": softcap,
        "logit_scale": logit_scale,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "class_weight": class_weight,
    }
    how: dict[str, Any] = {
        "reduction": reduction,
        "token_weight": token_weight,
        "num_items_in_batch": num_items_in_batch,
    }
    if is_traced():
        how["num_items_in_batch"] = traced_items(num_items_in_batch)
        operator = torch.ops.liger_patch.cross_entropy
        return operator(logits, labels, *constants(*options.values()), *how.values())[0]
    return _call(logits, labels, LossOptions(**options), **how)


@runs_eagerly
def _call(
    logits: Tensor, labels: Tensor, options: LossOptions, *, reduction: str, **how: Any
) -> Tensor:
    _check(logits, labels, options, reduction=reduction, **how)
    factors = _factors(logits, labels, options, reduction=reduction, **how)
    return _CrossEntropy.apply(logits, labels.to(torch.int64), factors, options, reduction)


def _check(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions,
    *,
    token_weight: Tensor | None,
    **how: Any,
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
    check_token_arguments(labels, logits.shape[0], logits.device, token_weight=token_weight, **how)


def _factors(logits: Tensor, labels: Tensor, options: LossOptions, **how: Any) -> Tensor:
    """Return (N,) the factors of the tokens' losses; raise ValueError for a label outside."""
    compacted = compact_labels(labels, logits.shape[1], options.ignore_index)
    dtype = accumulation_dtype(logits.dtype)
    factors = token_factors(labels, compacted, options, dtype=dtype, **how)
    compacted.read_count()  # for the check of the labels
    return factors


_OPTIONS = (
    "int ignore_index, float? softcap, float logit_scale, float label_smoothing, float z_loss, "
    "Tensor? class_weight"
)


def _arguments(options: Any, how: Any) -> tuple[LossOptions, dict[str, Any]]:
    names = "reduction", "token_weight", "num_items_in_batch"
    return LossOptions(*options), dict(zip(names, how, strict=True))


def _loss_results(logits: Tensor, labels: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    options, how = _arguments(others[:6], others[6:])
    _check(logits, labels, options, **how)
    factors = logits.new_empty(labels.shape, dtype=accumulation_dtype(logits.dtype))
    return factors.new_empty(labels.shape if how["reduction"] == "none" else ()), factors


def _loss(logits: Tensor, labels: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    options, how = _arguments(others[:6], others[6:])
    _check(logits, labels, options, **how)
    factors = _factors(logits, labels, options, **how).contiguous()
    logits = contiguous_features(logits)
    losses = cross_entropy_rows(logits, labels.to(torch.int64), options) * factors
    return losses if how["reduction"] == "none" else losses.sum(), factors


def _backward_results(
    grad_output: Tensor, logits: Tensor, labels: Tensor, factors: Tensor, *options: Any
) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _backward(
    grad_output: Tensor, logits: Tensor, labels: Tensor, factors: Tensor, *options: Any
) -> Tensor:
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    cross_entropy_rows(
        contiguous_features(logits),
        labels.to(torch.int64),
        LossOptions(*options),
        dlogits=dlogits,
        row_scale=factors * grad_output,
    )
    return dlogits


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    logits, labels, *options, class_weight, _, _, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, labels, output[1], class_weight)
    ctx.options = options


def _gradients(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    check_backward("cross_entropy", grad_output)
    logits, labels, factors, class_weight = ctx.saved_tensors
    arguments = (logits, labels, factors, *ctx.options, class_weight)
    dlogits = torch.ops.liger_patch.cross_entropy_backward(grad_output, *arguments)
    return (dlogits, *[None] * 10)


if define(
    "cross_entropy",
    f"(Tensor logits, Tensor labels, {_OPTIONS}, str reduction, Tensor? token_weight, "
    "Tensor? num_items_in_batch) -> (Tensor loss, Tensor factors)",
    _loss,
    _loss_results,
    reads_values=True,
):
    define(
        "cross_entropy_backward",
        f"(Tensor grad_output, Tensor logits, Tensor labels, Tensor factors, {_OPTIONS}) -> Tensor",
        _backward,
        _backward_results,
        is_backward=True,
    )
    torch.library.register_autograd("liger_patch::cross_entropy", _gradients, setup_context=_save)
