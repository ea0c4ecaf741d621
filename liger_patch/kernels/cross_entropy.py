"""Cross entropy of ready-made logits: the rows' kernel behind an autograd function.

N: tokens, V: vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    accumulation_dtype,
    check_backward,
    check_plain_tensors,
    runs_eagerly,
)
from liger_patch.kernels.head.labels import (
    check_token_arguments,
    compact_labels,
    token_factors,
)
from liger_patch.kernels.head.logits import cross_entropy_rows
from liger_patch.kernels.options import LossOptions


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits: Tensor, labels: Tensor, factors: Tensor, options: LossOptions, reduction: str
    ) -> Tensor:
        logits = _rows(logits)
        ctx.save_for_backward(logits, labels, factors, options.class_weight)
        ctx.options = options
        losses = cross_entropy_rows(logits, labels, options) * factors
        return losses if reduction == "none" else losses.sum()

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        check_backward("cross_entropy", grad_output)
        logits, labels, factors, class_weight = ctx.saved_tensors
        options = replace(ctx.options, class_weight=class_weight)
        logits = _rows(logits)  # hooks of saved tensors may have given them other strides
        dlogits = torch.empty_like(logits)
        cross_entropy_rows(
            logits, labels, options, dlogits=dlogits, row_scale=factors * grad_output
        )
        return dlogits, None, None, None, None


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


@runs_eagerly
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
    0, with zero gradients, of an empty batch, of one whose labels are all ignored, and where all
    supervised labels have class weight 0. The mean of the z-loss is divided as that of the cross
    entropy is: by the sum of the class weights of the labels, where there are any (Liger-Kernel
    divides by the number of tokens).

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit, a label outside the
            vocabulary.
    """
    check_plain_tensors(
        logits=logits, labels=labels, class_weight=class_weight, token_weight=token_weight
    )
    if logits.dim() != 2 or not logits.shape[1] or not logits.is_floating_point():
        raise ValueError(
            "logits must be a floating-point (N, V) tensor, got "
            f"{logits.dtype} {tuple(logits.shape)}"
        )
    vocab_size = logits.shape[1]
    options = LossOptions(ignore_index, softcap, logit_scale, label_smoothing, z_loss, class_weight)
    options.check(vocab_size, logits.device)
    check_token_arguments(
        labels,
        len(logits),
        logits.device,
        reduction=reduction,
        token_weight=token_weight,
        num_items_in_batch=num_items_in_batch,
    )
    compacted = compact_labels(labels, vocab_size, ignore_index)
    factors = token_factors(
        labels,
        compacted.counts[0],
        options,
        reduction=reduction,
        token_weight=token_weight,
        num_items_in_batch=num_items_in_batch,
        dtype=accumulation_dtype(logits.dtype),
    )
    compacted.read_count()  # for the check of the labels
    return _CrossEntropy.apply(logits, labels.to(torch.int64), factors, options, reduction)
