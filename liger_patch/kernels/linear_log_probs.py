"""Log-probabilities of labels under ``hidden_states @ weight.T``, without the (N, V) logits.

What trainers of preferences and rewards need of a head: per token, with what else is known of its
distribution (``head/statistics``). N: tokens, n: supervised tokens, H: hidden size, V: vocabulary.
The chunks are those of ``head/chunked``.

Gradients are computed in the forward pass, as if the upstream gradient of every log-probability
were that of minus their mean, where that saves a product: with a frozen head each token's row is
scaled in the backward pass, two products of 2 n H V operations in all; with a trainable head the
sums over tokens are scaled where the upstream gradient is indeed the same for all tokens, three
products. Where it is not, the backward pass computes them again with the gradient that came, and so
it does for gradients of entropy and lse, for float16, and in a second backward pass over one graph.
"""

import math
from collections.abc import Collection
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    accumulation_dtype,
    check_backward,
    runs_eagerly,
    without_autocast,
)
from liger_patch.kernels.head.chunked import ChunkConfig, prepare_chunks, run_chunks
from liger_patch.kernels.head.gradients import scale_
from liger_patch.kernels.head.inputs import (
    HeadInputs,
    QuantizedWeight,
    Wanted,
    save_inputs,
    saved_inputs,
)
from liger_patch.kernels.head.logits import weight_slices
from liger_patch.kernels.head.statistics import UpstreamGradients
from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.vocab_shard import VocabShard

SLAB = 1024  # tokens that are converted at a time


class LogProbs(NamedTuple):
    """Of each token, (N,), 0 (False) where it is ignored; None where not asked for.

    Attributes:
        log_probs: of the label.
        entropy: of the distribution, in nats.
        is_top1: whether the label is the most likely class, or the first of several. Where logits
            are never written (bf16 on Hopper), of equal ones in a block of 128 classes none is.
        lse: log of the sum of the exponentials of the logits.
        mean_logits: over the vocabulary, after scale, softcap and temperature. No gradient.
        log_sum_sq_probs: log of the sum of the squared probabilities. No gradient.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    lse: Tensor | None = None
    mean_logits: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        config: ChunkConfig,
        outputs: frozenset[str],
        same_gradient: bool,
        *inputs: Any,
    ):
        ctx.set_materialize_grads(False)
        labels, head_inputs = config.labels, HeadInputs(*inputs)
        in_forward = config.has_gradients_in_forward(same_for_all=same_gradient)
        scale = _expected_scale(config)
        needs_rows = config.options.softcap is not None or config.shard is not None
        asked = outputs - {"log_probs"} - (set() if needs_rows else {"mean_logits"})
        result = run_chunks(
            config,
            head_inputs,
            scale.expand(len(labels.labels)).contiguous(),
            config.wanted if in_forward else Wanted(),
            statistics=asked,
        )
        values = {"log_probs": -result.losses}
        if result.statistics is not None:
            values |= result.statistics._asdict()
        if "mean_logits" in outputs - asked:
            values["mean_logits"] = _mean_logits(head_inputs, config)
        ctx.config, ctx.scale = config, scale
        ctx.gradients = result.gradients if in_forward else None
        save_inputs(ctx, inputs, config.options)
        results = [
            # no view: autograd forbids in-place changes of the views that a function returns
            labels.scatter(values[name].clone()) if name in outputs else None
            for name in LogProbs._fields
        ]
        ctx.mark_non_differentiable(*(r for r in (results[2], *results[4:]) if r is not None))
        return tuple(results)

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):
        check_backward("linear_log_probs", *upstream)
        config: ChunkConfig = ctx.config
        labels = config.labels
        dlog_probs, dentropy, _, dlse, *_ = (
            None if each is None else labels.gather(each) for each in upstream
        )
        # kept no longer: a second backward pass computes its own
        gradients, ctx.gradients = ctx.gradients, None
        if dentropy is None and dlse is None and dlog_probs is not None:
            if gradients is not None and not config.wanted.sums:
                labels.scale_rows_(gradients, -dlog_probs / ctx.scale)
                return None, None, None, *gradients
            # the one place that waits for the device: gradients of sums cannot be mended
            if gradients is not None and _is_one_number(dlog_probs):
                if len(dlog_probs):
                    present = [each for each in gradients if each is not None]
                    scale_(present, -dlog_probs[0] / ctx.scale)
                return None, None, None, *gradients
        del gradients
        gradients = _gradients(ctx, UpstreamGradients(dlog_probs, dentropy, dlse))
        return None, None, None, *gradients


def _expected_scale(config: ChunkConfig) -> Tensor:
    """Return () 1 / n: minus the upstream gradient of each log-probability where the loss is minus
    their mean, as is expected.
    """
    count = config.labels.counts[0]
    return count.clamp(min=1).to(accumulation_dtype(config.dtype)).reciprocal()


def _is_one_number(gradient: Tensor) -> bool:
    return gradient.is_meta or bool((gradient == gradient[:1]).all())


def _gradients(ctx: Any, upstream: UpstreamGradients) -> list[Tensor | None]:
    """Compute the chunks once more, with the upstream gradients (n,) in place."""
    config: ChunkConfig = ctx.config
    inputs, _ = saved_inputs(ctx)
    dtype, labels = accumulation_dtype(config.dtype), config.labels
    dlog_probs, dentropy, dlse = upstream
    if dlog_probs is None:
        row_scale = labels.labels.new_zeros(labels.read_count(), dtype=dtype)
    else:
        row_scale = (-dlog_probs).to(dtype).contiguous()
    if dentropy is None and dlse is None:
        return run_chunks(config, inputs, row_scale, config.wanted).gradients
    upstream = UpstreamGradients(*(u if u is None else u.contiguous() for u in upstream))
    return run_chunks(config, inputs, row_scale, config.wanted, upstream=upstream).gradients


def _mean_logits(inputs: HeadInputs, config: ChunkConfig) -> Tensor:
    """Return (n,) the mean over the vocabulary of logits without a softcap: it is linear in the
    weight.
    """
    total = None
    with without_autocast(inputs.hidden_states.device.type):
        for states, weight in inputs.products():
            dtype = accumulation_dtype(states.dtype)
            parts = [part.sum(0, dtype=dtype) for _, part in weight_slices(weight)]
            rows = torch.stack(parts).sum(0)
            slabs = config.labels.gather(states).split(SLAB)
            product = torch.cat([slab.to(dtype) @ rows for slab in slabs])
            total = product if total is None else total + product
        assert total is not None
        if inputs.bias is not None:
            total = total + inputs.bias.sum(dtype=total.dtype)
    return total * (config.options.logit_scale / inputs.weight.shape[0])


@runs_eagerly
def linear_log_probs(
    hidden_states: Tensor,  # (N, H)
    weight: Tensor | QuantizedWeight,  # (V, H)
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
    chunk_mib: float | None = None,
    vocab_shard: VocabShard | None = None,
) -> LogProbs:
    """Compute ``log_softmax(linear(hidden_states, weight, bias))`` at the labels, without logits.

    Under autocast the products run in the autocast dtype, as those of
    ``torch.nn.functional.linear`` do; the softmax is computed in float32 (float64 for float64
    inputs). Each gradient has its input's own dtype.

    Args:
        hidden_states: (N, H).
        weight: (V, H), on the same device. A ``QuantizedWeight`` has no gradient and is dequantised
            64 MiB at a time.
        labels: (N,) integers in [0, V), or ``ignore_index`` where a token is not supervised.
        bias: (V,), added to the logits.
        low_rank: (N, R) and (V, R), whose product is added to the logits: an adapter (LoRA) on the
            head.
        softcap: logits become ``softcap * tanh(logits / softcap)``, after ``logit_scale``.
        logit_scale: factor on the logits.
        temperature: > 0, divides the logits after the softcap.
        outputs: which fields of ``LogProbs`` are computed beside ``log_probs``. Gradients flow
            through ``entropy`` and ``lse`` too.
        same_gradient: whether the upstream gradient of ``log_probs`` can be expected to be the same
            for all supervised tokens, as that of their sum or mean is. The gradients are right
            either way: with a trainable head, a right guess saves a matrix product, a wrong one
            costs two.
        chunk_mib: MiB of logits held at once, as in ``linear_cross_entropy``.
        vocab_shard: of a vocabulary that is distributed over ranks, as in ``linear_cross_entropy``;
            upstream gradients are the same on every rank too.

    Returns:
        Per token, (N,): float32 (float64 for float64 inputs), ``is_top1`` bool.

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit, a label outside the
            vocabulary.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    if not isinstance(temperature, Real) or not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a finite number > 0, got {temperature!r}")
    names = {outputs} if isinstance(outputs, str) else outputs
    if not isinstance(names, Collection) or any(n not in LogProbs._fields for n in names):
        raise ValueError(f"outputs must be among {LogProbs._fields}, got {outputs!r}")
    LossOptions(ignore_index, softcap, logit_scale)  # refuses what is no number
    # softcap / T * tanh(logit_scale / T * x / (softcap / T)): temperature is no option of its own
    cap = None if softcap is None else softcap / temperature
    options = LossOptions(ignore_index, cap, logit_scale / temperature)
    config, inputs = prepare_chunks(
        hidden_states, weight, labels, bias, low_rank, options, chunk_mib, shard=vocab_shard
    )
    outputs = frozenset({*names, "log_probs"})
    return LogProbs(*_LinearLogProbs.apply(config, outputs, same_gradient, *inputs))
