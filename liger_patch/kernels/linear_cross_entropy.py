"""Cross entropy of ``hidden_states @ weight.T`` and its gradients, without the (N, V) logits.

N: tokens, n: supervised tokens, H: hidden size, V: vocabulary. The chunks are those of
``head_pass``; gradients are computed in the forward pass, so forward and backward cost three matrix
products of 2 n H V operations, two with a frozen head, one without gradients.

The backward pass multiplies by the upstream gradient, and reads and writes nothing where that is 1.
The chunks are computed again, with the upstream gradient in place, where it is not one number
(reduction "none" with a trainable head), where float16 would lose small gradients before a loss
scale reaches them, and in a second backward pass over one graph. The gradient in the forward pass:
Liger-Kernel (arXiv:2410.10989).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.autocast import without_autocast
from liger_patch.kernels.compilation import runs_eagerly
from liger_patch.kernels.differentiation import check_backward
from liger_patch.kernels.head.arguments import checked_chunk_bytes, checked_inputs, product_dtype
from liger_patch.kernels.head.chunked import HeadPass, Passed
from liger_patch.kernels.head.inputs import HeadInputs, QuantizedWeight, Wanted
from liger_patch.kernels.head.labels import (
    Supervised,
    check_tokens,
    order_tokens,
    refuse_others_than_tensors,
    token_factors,
)
from liger_patch.kernels.head.logits import prepare_head
from liger_patch.kernels.head.options import LossOptions
from liger_patch.kernels.head.pytorch import accumulation_dtype
from liger_patch.kernels.head.saved_inputs import save_inputs, saved_inputs
from liger_patch.kernels.head.scale import scale_


@dataclass(frozen=True)
class _Problem:
    """All that one call knows beside its inputs."""

    head_pass: HeadPass
    factors: Tensor  # (N,) of each token's loss in the result, in the order of the tokens
    options: LossOptions
    reduction: str
    wanted: Wanted

    @property
    def gradients_in_forward(self) -> bool:
        """Whether gradients can be computed now and scaled when the upstream one is known."""
        if not any(self.wanted) or self.head_pass.dtype == torch.float16:
            return False
        return self.reduction != "none" or not self.wanted.sums

    def run(
        self,
        inputs: HeadInputs,
        row_scale: Tensor,
        wanted: Wanted,
        supervised: Supervised | None = None,
    ) -> Passed:
        make_head = partial(prepare_head, tokens=self.head_pass.tokens, options=self.options)
        return self.head_pass.run(inputs, make_head, row_scale, wanted, supervised)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem: _Problem, *inputs: Any) -> Tensor:
        wanted = problem.wanted if problem.gradients_in_forward else Wanted()
        head_inputs = HeadInputs(*inputs)
        with without_autocast(head_inputs.hidden_states.device.type):
            head, supervised, gradients = problem.run(head_inputs, problem.factors, wanted)
            n = len(supervised.labels)
            losses = head.losses[:n] * problem.factors[:n]
        ctx.problem, ctx.supervised = problem, supervised
        ctx.gradients = gradients if problem.gradients_in_forward else None
        save_inputs(ctx, inputs, problem.options)
        return supervised.scatter(losses) if problem.reduction == "none" else losses.sum()

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        check_backward("linear_cross_entropy", grad_output)
        problem: _Problem = ctx.problem
        supervised: Supervised = ctx.supervised
        per_token = problem.reduction == "none"
        # given away: a second backward pass computes its own
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            factors = problem.factors[: len(supervised.labels)]
            row_scale = factors * (supervised.gather(grad_output) if per_token else grad_output)
            inputs, options = saved_inputs(ctx)
            problem = replace(problem, options=options)
            with without_autocast(grad_output.device.type):
                gradients = problem.run(inputs, row_scale, problem.wanted, supervised).gradients
        elif per_token:
            supervised.scale_rows_(gradients, supervised.gather(grad_output))
        else:
            scale_([each for each in gradients if each is not None], grad_output)
        return None, *gradients


@runs_eagerly
def linear_cross_entropy(
    hidden_states: Tensor,  # (N, H)
    weight: Tensor | QuantizedWeight,  # (V, H)
    labels: Tensor,  # (N,)
    *,
    bias: Tensor | None = None,  # (V,)
    low_rank: tuple[Tensor, Tensor] | None = None,  # (N, R), (V, R)
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,  # (V,)
    token_weight: Tensor | None = None,  # (N,)
    num_items_in_batch: Tensor | int | None = None,
    chunk_mib: float | None = None,
) -> Tensor:
    """``cross_entropy(linear(hidden_states, weight, bias), labels)`` without the (N, V) logits.

    Named after, and equal to, ``torch.nn.functional.linear_cross_entropy`` wherever both are
    defined. Under autocast the products run in the autocast dtype, as those of
    ``torch.nn.functional.linear`` do; the softmax is computed in float32 (float64 for float64
    inputs). Each gradient has its input's own dtype.

    Args:
        hidden_states: (N, H).
        weight: (V, H), on the same device. A ``QuantizedWeight`` has no gradient and is dequantised
            64 MiB at a time.
        labels: (N,) integers in [0, V), or ``ignore_index`` where a token is not supervised.
        bias: (V,), added to the logits.
        low_rank: (N, R) and (V, R), whose product is added to the logits: an adapter (LoRA) on the
            head. Of any floating dtype; the product is computed in that of the others.
        reduction: "mean", "sum" or "none".
        softcap: logits become ``softcap * tanh(logits / softcap)``, after ``logit_scale``.
        logit_scale: factor on the logits.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``, in [0, 1].
        z_loss: adds ``z_loss * logsumexp(logits) ** 2`` to each token's loss.
        class_weight: (V,), ``weight`` of ``torch.nn.functional.cross_entropy``.
        token_weight: (N,) factor on each token's loss; the mean is then the weighted mean.
        num_items_in_batch: denominator of the mean instead of the (weighted) number of supervised
            tokens; 0 counts as 1.
        chunk_mib: MiB of logits held at once, > 0; at least one token's row. By default 512, or
            256 where the weight needs no gradient. Where a 16-bit gradient of the weight would be
            summed over more than 16 chunks, more logits are held, or the sum is kept in float32,
            whichever takes less memory.

    Returns:
        () or, for "none", (N,) with 0 where ignored; float32, float64 for float64 inputs. It
        differs from PyTorch's as that of ``cross_entropy`` does: 0 where PyTorch's mean is nan.

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit, a label outside the
            vocabulary.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    named = {"hidden_states": hidden_states, "bias": bias, "labels": labels}
    refuse_others_than_tensors(**named, class_weight=class_weight, token_weight=token_weight)
    inputs = checked_inputs(hidden_states, weight, bias, low_rank)
    wanted = Wanted.by(inputs)
    chunk_bytes = checked_chunk_bytes(chunk_mib, trains_weight=wanted.weight)
    vocab_size, device = weight.shape[0], hidden_states.device
    options = LossOptions(ignore_index, softcap, logit_scale, label_smoothing, z_loss, class_weight)
    options.check(vocab_size, device)
    check_tokens(
        labels,
        len(hidden_states),
        device,
        reduction=reduction,
        token_weight=token_weight,
        num_items_in_batch=num_items_in_batch,
    )
    dtype = product_dtype(inputs)
    tokens = order_tokens(labels, vocab_size, ignore_index)
    factors = token_factors(
        labels,
        tokens.counts[0],
        options,
        reduction=reduction,
        token_weight=token_weight,
        num_items_in_batch=num_items_in_batch,
        dtype=accumulation_dtype(dtype),
    )
    problem = _Problem(
        HeadPass(tokens, dtype, chunk_bytes),
        factors.contiguous() if token_weight is None else factors.index_select(0, tokens.rows),
        options,
        reduction,
        wanted,
    )
    return _LinearCrossEntropy.apply(problem, *inputs)
