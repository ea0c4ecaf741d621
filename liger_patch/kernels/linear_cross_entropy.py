"""Cross entropy of ``hidden_states @ weight.T`` and its gradients, without the (N, V) logits.

N: tokens, n: supervised tokens, H: hidden size, V: vocabulary. The chunks are those of
``head/chunked``; gradients are computed in the forward pass, so forward and backward cost three
matrix products of 2 n H V operations, two with a frozen head, one without gradients.

The backward pass multiplies by the upstream gradient, and reads and writes nothing where that is 1.
The chunks are computed again, with the upstream gradient in place, where it is not one number
(reduction "none" with a trainable head), where float16 would lose small gradients before a loss
scale reaches them, and in a second backward pass over one graph. The gradient in the forward pass:
Liger-Kernel (arXiv:2410.10989).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import check_backward
from liger_patch.kernels.graphs import is_traced, runs_eagerly
from liger_patch.kernels.head import operators
from liger_patch.kernels.head.chunked import ChunkConfig, check_arguments, prepare_chunks
from liger_patch.kernels.head.gradients import scale_
from liger_patch.kernels.head.inputs import HeadInputs, save_inputs, saved_inputs
from liger_patch.kernels.head.losses import loss_and_gradients, loss_factors, loss_gradients
from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.vocab_shard import VocabShard


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        config: ChunkConfig,
        factors: Tensor,  # (N,) of each token's loss, in the order of the compacted labels
        reduction: str,
        *inputs: Any,
    ) -> Tensor:
        loss, ctx.gradients = loss_and_gradients(config, HeadInputs(*inputs), factors, reduction)
        ctx.config, ctx.factors, ctx.reduction = config, factors, reduction
        save_inputs(ctx, inputs, config.options)
        return loss

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        check_backward("linear_cross_entropy", grad_output)
        config: ChunkConfig = ctx.config
        labels, per_token = config.labels, ctx.reduction == "none"
        # kept no longer: a second backward pass computes its own
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            inputs, options = saved_inputs(ctx)
            config = replace(config, options=options)
            gradients = loss_gradients(config, inputs, ctx.factors, grad_output)
        elif per_token:
            labels.scale_rows_(gradients, labels.gather(grad_output))
        else:
            scale_([each for each in gradients if each is not None], grad_output)
        return None, None, None, *gradients


def linear_cross_entropy(
    hidden_states: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
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
    vocab_shard: VocabShard | None = None,
    hopper_kernels: bool | None = None,
) -> Tensor:
    """Compute ``cross_entropy(linear(hidden_states, weight, bias), labels)`` without (N, V) logits.

    Within ``torch.compile``, ``torch.export``, ``make_fx``, ``FakeTensorMode`` and selective
    checkpointing it is the operator ``liger_patch::linear_cross_entropy``. A ``vocab_shard`` and
    ``hopper_kernels`` break the graph of ``torch.compile``, and are an error within the others.

    Named after, and equal to, ``torch.nn.functional.linear_cross_entropy`` wherever both are
    defined. Under autocast the products run in the autocast dtype, as those of
    ``torch.nn.functional.linear`` do; the softmax is computed in float32 (float64 for float64
    inputs). Each gradient has its input's own dtype.

    Args:
        hidden_states: (N, H).
        weight: (V, H), on the same device.
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
        vocab_shard: of a vocabulary that is distributed over ranks (tensor parallel): weight, bias
            and ``low_rank[1]`` are this rank's rows (V_r, ...), everything else is for the whole
            vocabulary and the same on every rank, as are the results. The gradients of
            ``hidden_states`` and ``low_rank[0]`` are summed over the ranks.
        hopper_kernels: True to run the kernels for large batches, whatever the number of tokens:
            Hopper's own, or other GPUs' where these do not serve. False runs on Hopper what other
            GPUs run. None: as True for more than 512 tokens. Of no effect with ``vocab_shard``.

    Returns:
        () or, for "none", (N,) with 0 where ignored; float32, float64 for float64 inputs. It
        differs from PyTorch's as that of ``cross_entropy`` does: 0 where PyTorch's mean is nan.

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit, a label outside the
            vocabulary.
        RuntimeError: in the backward pass, with ``create_graph=True``.
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
    if not (hopper_kernels is None or isinstance(hopper_kernels, bool)):
        raise ValueError(f"hopper_kernels must be True, False or None, got {hopper_kernels!r}")
    is_plain = vocab_shard is None and hopper_kernels is None
    if is_traced() and is_plain:
        given = hidden_states, weight, bias, low_rank, labels
        return operators.linear_cross_entropy(*given, options=options, chunk_mib=chunk_mib, **how)
    given = hidden_states, weight, bias, low_rank, labels
    shard = vocab_shard
    return _call(*given, LossOptions(**options), chunk_mib, shard, hopper_kernels, **how)


@runs_eagerly
def _call(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low_rank: tuple[Tensor, Tensor] | None,
    labels: Tensor,
    options: LossOptions,
    chunk_mib: float | None,
    shard: VocabShard | None,
    hopper_kernels: bool | None,
    *,
    reduction: str,
    **how: Any,
) -> Tensor:
    inputs = check_arguments(
        hidden_states,
        weight,
        labels,
        bias,
        low_rank,
        options,
        shard=shard,
        reduction=reduction,
        **how,
    )
    config = prepare_chunks(
        inputs, labels, options, chunk_mib, shard, hopper_kernels=hopper_kernels
    )
    factors = loss_factors(config, labels, reduction=reduction, **how)
    return _LinearCrossEntropy.apply(config, factors, reduction, *inputs)
