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
from collections.abc import Callable, Collection
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, check_backward, without_autocast
from liger_patch.kernels.graphs import runs_eagerly
from liger_patch.kernels.head.chunked import (
    ChunkConfig,
    check_arguments,
    prepare_chunks,
    run_chunks,
)
from liger_patch.kernels.head.gradients import scale_
from liger_patch.kernels.head.inputs import (
    HeadInputs,
    VocabShard,
    Wanted,
    save_inputs,
    saved_inputs,
)
from liger_patch.kernels.head.row_sums import UpstreamGradients
from liger_patch.kernels.options import LossOptions

SLAB = 1024  # tokens that are converted at a time
RANGE = 1e-30, 1e30  # of weights whose sums and ratios keep their digits in float32 and bf16
ROUNDING = 8  # eps that an upstream gradient may be off: a loss multiplies and divides some times


class LogProbs(NamedTuple):
    """Of each token's logits after scale, softcap and temperature, in nats: (N,) each, 0 (False)
    where the token is ignored; None where not asked for.

    Attributes:
        log_probs: of the label.
        entropy: of the distribution.
        is_top1: whether the label is the most likely class, or the first of several equal ones.
            Where logits are never written (bf16 on Hopper), it is False for each of several equal
            ones in a block of 128 classes.
        lse: log of the sum of the exponentials of the logits.
        mean_logits: over the vocabulary. No gradient.
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
        outputs: set[str],
        same_gradient: bool,
        row_weights: Tensor | None,
        *inputs: Any,
    ):
        ctx.set_materialize_grads(False)
        head, options, labels = HeadInputs(*inputs), config.options, config.labels
        expected = _expected_upstream(config, row_weights)
        in_forward = config.wanted.in_forward(config.dtype, same_for_all=same_gradient)
        needs_rows = options.softcap is not None or config.shard is not None
        asked = outputs - {"log_probs"} - (set() if needs_rows else {"mean_logits"})
        wanted = config.wanted if in_forward else Wanted()
        result = run_chunks(config, head, -expected, wanted, statistics=asked)
        values = {"log_probs": -result.losses}
        if result.statistics is not None:
            values |= result.statistics._asdict()
        if "mean_logits" in outputs - asked:
            values["mean_logits"] = mean_logits(head, options.logit_scale, labels.gather)
        results = [
            # no view: autograd forbids in-place changes of the views that a function returns
            labels.scatter(values[name].clone()) if name in outputs else None
            for name in LogProbs._fields
        ]
        ctx.config, ctx.expected = config, expected
        ctx.gradients = result.gradients if in_forward else None
        save_inputs(ctx, inputs, options)
        ctx.mark_non_differentiable(*(r for r in (results[2], *results[4:]) if r is not None))
        return tuple(results)

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):
        check_backward("linear_log_probs", *upstream)
        dlog_probs, dentropy, _, dlse, *_ = upstream
        # kept no longer: a second backward pass computes its own
        gradients, ctx.gradients = ctx.gradients, None
        upstream_gradients = UpstreamGradients(dlog_probs, dentropy, dlse)
        gradients = _gradients_(
            ctx.config, lambda: saved_inputs(ctx)[0], ctx.expected, gradients, upstream_gradients
        )
        return None, None, None, None, *gradients


def _gradients_(
    config: ChunkConfig,
    inputs: Callable[[], HeadInputs],
    expected: Tensor,
    gradients: list[Tensor | None] | None,
    upstream: UpstreamGradients,
) -> list[Tensor | None]:
    """Return the gradients for upstream gradients (N,): those of the forward pass, scaled and
    corrected in place, where they can be; else the chunks are computed again.
    """
    labels = config.labels
    n = labels.read_count()
    of_rows = (None if each is None else labels.gather(each) for each in upstream)
    dlog_probs, dentropy, dlse = upstream = UpstreamGradients(*of_rows)
    if dentropy is None and dlse is None and dlog_probs is not None and gradients is not None:
        if not n:
            return gradients
        expected = expected[:n]
        if not config.wanted.sums:
            labels.scale_rows_(gradients, dlog_probs / expected)
            return gradients
        factor, places = _fit(expected, dlog_probs)
        if len(places) < n:
            scale_([each for each in gradients if each is not None], factor)
            if not len(places):
                return gradients
            of_places = dlog_probs.index_select(0, places)
            missing = of_places - factor * expected.index_select(0, places)
            some = replace(config, labels=labels.some(places))
            how: dict[str, Any] = {"totals": gradients}
            gradients = run_chunks(some, inputs(), -missing, config.wanted, **how).gradients
            factors = torch.ones_like(dlog_probs).index_copy_(0, places, of_places / missing)
            labels.scale_rows_(gradients[::3], factors)  # of states, whose rows are no sums
            return gradients
    if gradients is not None:
        gradients.clear()  # freed before others are computed
    return _computed_again(config, inputs(), upstream)


def _expected_upstream(config: ChunkConfig, row_weights: Tensor | None) -> Tensor:
    """Return (N,), in the order of the compacted labels, the upstream gradients that the forward
    pass expects, up to a common factor: with a trained head ``row_weights``, 0 where one is out of
    RANGE; else those of minus the mean of the log-probabilities.
    """
    labels, dtype = config.labels, accumulation_dtype(config.dtype)
    if row_weights is None or not config.wanted.sums:
        return -labels.counts[0].clamp(min=1).to(dtype).reciprocal().expand(len(labels.labels))
    weights = row_weights.to(dtype).index_select(0, labels.rows)
    size = weights.abs()
    return weights.masked_fill(~((size > RANGE[0]) & (size < RANGE[1])), 0.0)


def _fit(expected: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Return () the factor between expected and true upstream gradients (n,), and (d,) the places
    where these differ by more than rounding. All n, if those have most of the weight: to correct
    the sums would cancel digits.
    """
    if upstream.is_meta:
        return upstream[0], torch.empty(0, dtype=torch.int64, device=upstream.device)
    ratios, _ = (upstream / expected).masked_fill(expected == 0, math.nan).sort()  # nan last
    middle = ((expected != 0).sum() - 1).clamp(min=0) // 2
    factor = ratios.index_select(0, middle[None])[0].nan_to_num(0.0, 0.0, 0.0)
    allowed = ROUNDING * torch.finfo(upstream.dtype).eps * upstream.abs()
    differs = ~((upstream - factor * expected).abs() <= allowed)
    weight = expected.abs()
    has_most = weight.masked_fill(differs, 0.0).sum() * 2 >= weight.sum()
    is_close = has_most & upstream.isfinite().all()
    # the one place that waits for the device
    return factor, (differs | ~is_close).nonzero()[:, 0]


def _computed_again(
    config: ChunkConfig, inputs: HeadInputs, upstream: UpstreamGradients
) -> list[Tensor | None]:
    """Compute the chunks once more, for these upstream gradients (n,)."""
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


def mean_logits(
    inputs: HeadInputs, logit_scale: float, gather: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return (n,) the mean over the vocabulary of logits without a softcap, for the rows that
    ``gather`` takes: it is linear in the weight.
    """
    total = None
    with without_autocast(inputs.hidden_states.device.type):
        for states, weight in inputs.products():
            dtype = accumulation_dtype(states.dtype)
            rows = weight.sum(0, dtype=dtype)
            slabs = gather(states).split(SLAB)
            product = torch.cat([slab.to(dtype) @ rows for slab in slabs])
            total = product if total is None else total + product
        assert total is not None
        if inputs.bias is not None:
            total = total + inputs.bias.sum(dtype=total.dtype)
    return total * (logit_scale / inputs.weight.shape[0])


@runs_eagerly
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

    ``torch.compile`` breaks the graph here; ``torch.export``, ``make_fx`` and ``FakeTensorMode``
    get an error.

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
    if not isinstance(temperature, Real) or not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a finite number > 0, got {temperature!r}")
    names = {outputs} if isinstance(outputs, str) else outputs
    if not isinstance(names, Collection) or any(n not in LogProbs._fields for n in names):
        raise ValueError(f"outputs must be among {LogProbs._fields}, got {outputs!r}")
    LossOptions(ignore_index, softcap, logit_scale)  # refuses what is no number
    # softcap / T * tanh(logit_scale / T * x / (softcap / T)): temperature is no option of its own
    softcap = None if softcap is None else softcap / temperature
    options = LossOptions(ignore_index, softcap, logit_scale / temperature)
    given = hidden_states, weight, labels, bias, low_rank, options
    inputs = check_arguments(*given, row_weights=row_weights, shard=vocab_shard)
    config = prepare_chunks(inputs, labels, options, chunk_mib, vocab_shard)
    how = {*names, "log_probs"}, same_gradient or row_weights is not None, row_weights
    return LogProbs(*_LinearLogProbs.apply(config, *how, *inputs))
