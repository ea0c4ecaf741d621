"""Log-probabilities of labels under ``hidden_states @ weight.T``, without the (N, V) logits.

Trainers of preferences and rewards need these of a head, for each token, and the statistics of
``head/row_sums``. N: tokens, n: supervised tokens, H: hidden size, V: vocabulary. The chunks are
those of ``head/chunked``.

Where it saves a product, the forward pass computes gradients too, for an expected upstream
gradient: that of minus the mean of the log-probabilities, or, with a trainable head, one in
proportion to ``row_weights``. The backward pass corrects them:

- with a frozen head, it scales each token's row: two products of 2 n H V operations in all;
- with a trainable head, the gradients are sums over tokens. If the upstream gradient is the
  expected one times any factor, it scales these sums: three products. Rows where it is not are
  computed again, for their share of the sums; all rows, if those have most of the weight.

It also computes them again for gradients of entropy and lse, for float16, and in a second backward
pass over one graph.
"""

import math
from collections.abc import Collection
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import check_backward
from liger_patch.kernels.graphs import constants, is_traced, runs_eagerly
from liger_patch.kernels.head import operators
from liger_patch.kernels.head.chunked import ChunkConfig, check_arguments, prepare_chunks
from liger_patch.kernels.head.inputs import HeadInputs, save_inputs, saved_inputs
from liger_patch.kernels.head.losses import (
    LogProbs,
    expected_upstream,
    log_probs_and_gradients,
    log_probs_gradients_,
)
from liger_patch.kernels.head.row_sums import UpstreamGradients
from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.vocab_shard import VocabShard


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        config: ChunkConfig,
        outputs: Collection[str],
        same_gradient: bool,
        row_weights: Tensor | None,
        *inputs: Any,
    ):
        ctx.set_materialize_grads(False)
        ctx.expected = expected_upstream(config, row_weights)
        results, gradients = log_probs_and_gradients(
            config, HeadInputs(*inputs), outputs, ctx.expected, same_gradient=same_gradient
        )
        ctx.config, ctx.gradients = config, gradients
        save_inputs(ctx, inputs, config.options)
        ctx.mark_non_differentiable(*(r for r in (results[2], *results[4:]) if r is not None))
        return tuple(results)

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):
        check_backward("linear_log_probs", *upstream)
        dlog_probs, dentropy, _, dlse, *_ = upstream
        # kept no longer: a second backward pass computes its own
        gradients, ctx.gradients = ctx.gradients, None
        upstream_gradients = UpstreamGradients(dlog_probs, dentropy, dlse)
        gradients = log_probs_gradients_(
            ctx.config, lambda: saved_inputs(ctx)[0], ctx.expected, gradients, upstream_gradients
        )
        return None, None, None, None, *gradients


def linear_log_probs(
    hidden_states: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    *,
    bias: Tensor | None = None,  # (V,)
    low_rank: tuple[Tensor, Tensor] | None = None,  # (N, R), (V, R)
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    outputs: Collection[str] = (),
    same_gradient: bool = True,
    row_weights: Tensor | None = None,  # (N,)
    chunk_mib: float | None = None,
    vocab_shard: VocabShard | None = None,
) -> LogProbs:
    """Compute ``log_softmax(linear(hidden_states, weight, bias))`` at the labels, without logits.

    Within ``torch.compile`` and the others that ``linear_cross_entropy`` names, it is the operator
    ``liger_patch::linear_log_probs``.

    Args:
        hidden_states, weight, labels, bias, low_rank, ignore_index, softcap, logit_scale,
            chunk_mib: as in ``linear_cross_entropy``, and so are dtypes.
        temperature: > 0, divides the logits after the softcap.
        outputs: which fields of ``LogProbs`` are computed beside ``log_probs``. Gradients flow
            through ``entropy`` and ``lse`` too.
        same_gradient: whether the upstream gradient of ``log_probs`` can be expected to be the same
            for all supervised tokens, as that of their sum or mean is. The gradients are right
            either way: with a trainable head, a right guess saves a matrix product, a wrong one
            costs up to two.
        row_weights: (N,), what the loss multiplies each log-probability by, up to one factor for
            all: the upstream gradient that is expected instead, without a gradient of its own. Rows
            where it turns out otherwise are computed again, if they are few.
        vocab_shard: of a vocabulary that is distributed over ranks, as in ``linear_cross_entropy``;
            upstream gradients are the same on every rank too.

    Returns:
        Per token, (N,): float32 (float64 for float64 inputs), ``is_top1`` bool.

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit, a label outside the
            vocabulary.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    temperature, softcap, logit_scale = constants(temperature, softcap, logit_scale)
    if not isinstance(temperature, Real) or not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a finite number > 0, got {temperature!r}")
    names = {outputs} if isinstance(outputs, str) else outputs
    if not isinstance(names, Collection) or any(n not in LogProbs._fields for n in names):
        raise ValueError(f"outputs must be among {LogProbs._fields}, got {outputs!r}")
    LossOptions(ignore_index, softcap, logit_scale)  # refuses what is no number
    # softcap / T * tanh(logit_scale / T * x / (softcap / T)): temperature is no option of its own
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "softcap": None if softcap is None else softcap / temperature,
        "logit_scale": logit_scale / temperature,
    }
    asked, is_expected = {*names, "log_probs"}, same_gradient or row_weights is not None
    if is_traced() and vocab_shard is None:
        given = hidden_states, weight, bias, low_rank, labels
        options |= {"label_smoothing": 0.0, "z_loss": 0.0, "class_weight": None}
        how: dict[str, Any] = {"outputs": sorted(asked), "same_gradient": is_expected}
        how |= {"options": options, "chunk_mib": chunk_mib}
        return operators.linear_log_probs(*given, row_weights=row_weights, **how)
    given = hidden_states, weight, bias, low_rank, labels
    how = {"same_gradient": is_expected, "row_weights": row_weights}
    return _call(*given, LossOptions(**options), chunk_mib, vocab_shard, asked, **how)


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
    outputs: Collection[str],
    *,
    same_gradient: bool,
    row_weights: Tensor | None,
) -> LogProbs:
    given = hidden_states, weight, labels, bias, low_rank, options
    inputs = check_arguments(*given, row_weights=row_weights, shard=shard)
    config = prepare_chunks(inputs, labels, options, chunk_mib, shard)
    return LogProbs(*_LinearLogProbs.apply(config, outputs, same_gradient, row_weights, *inputs))
