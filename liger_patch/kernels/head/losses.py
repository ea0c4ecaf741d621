"""What the operators on a head compute of its chunks, as they are called and as operators of
``torch.library``: losses (``linear_cross_entropy``) and log-probabilities (``linear_log_probs``).
N: tokens, n: supervised tokens.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, without_autocast
from liger_patch.kernels.head.chunked import ChunkConfig, run_chunks
from liger_patch.kernels.head.gradients import scale_
from liger_patch.kernels.head.inputs import HeadInputs, Wanted
from liger_patch.kernels.head.labels import token_factors
from liger_patch.kernels.head.row_sums import UpstreamGradients

SLAB = 1024  # tokens that are converted at a time
RANGE = 1e-30, 1e30  # of weights whose sums and ratios keep their digits in float32 and bf16
ROUNDING = 8  # eps that an upstream gradient may be off: a loss multiplies and divides some times


def loss_factors(
    config: ChunkConfig, labels: Tensor, *, token_weight: Tensor | None, **how: Any
) -> Tensor:
    """Return (N,) the factors of the tokens' losses in the order of the compacted labels; ``how``:
    reduction and ``num_items_in_batch``.
    """
    dtype = accumulation_dtype(config.dtype)
    factors = token_factors(
        labels, config.labels, config.options, token_weight=token_weight, dtype=dtype, **how
    )
    if token_weight is None:
        return factors.contiguous()
    return factors.index_select(0, config.labels.rows)


def loss_and_gradients(
    config: ChunkConfig, inputs: HeadInputs, factors: Tensor, reduction: str
) -> tuple[Tensor, list[Tensor | None] | None]:
    """Return the loss, (N,) or (), and its gradients where the forward pass can compute them."""
    in_forward = config.has_gradients_in_forward(same_for_all=reduction != "none")
    result = run_chunks(config, inputs, factors, config.wanted if in_forward else Wanted())
    losses = result.losses * factors[: len(result.losses)]
    loss = config.labels.scatter(losses) if reduction == "none" else losses.sum()
    return loss, result.gradients if in_forward else None


def loss_gradients(
    config: ChunkConfig, inputs: HeadInputs, factors: Tensor, grad_output: Tensor
) -> list[Tensor | None]:
    """Compute the chunks again, with the upstream gradient (N,) or () in place."""
    labels = config.labels
    n = labels.read_count()
    upstream = labels.gather(grad_output) if grad_output.dim() else grad_output
    return run_chunks(config, inputs, factors[:n] * upstream, config.wanted).gradients


class LogProbs(NamedTuple):
    """Of each token, (N,), 0 (False) where it is ignored; None where not asked for.

    Attributes:
        log_probs: of the label.
        entropy: of the distribution, in nats.
        is_top1: whether the label is the most likely class, or the first of several equal ones.
            Where logits are never written (bf16 on Hopper), it is False for each of several equal
            ones in a block of 128 classes.
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


def log_probs_and_gradients(
    config: ChunkConfig,
    inputs: HeadInputs,
    outputs: Collection[str],
    expected: Tensor,
    *,
    same_gradient: bool,
) -> tuple[list[Tensor | None], list[Tensor | None] | None]:
    """Return the fields of ``LogProbs``, None where not asked for, and the gradients for the
    expected upstream gradients where the forward pass can compute them.
    """
    labels = config.labels
    in_forward = config.has_gradients_in_forward(same_for_all=same_gradient)
    needs_rows = config.options.softcap is not None or config.shard is not None
    asked = set(outputs) - {"log_probs"} - (set() if needs_rows else {"mean_logits"})
    wanted = config.wanted if in_forward else Wanted()
    result = run_chunks(config, inputs, -expected, wanted, statistics=asked)
    values = {"log_probs": -result.losses}
    if result.statistics is not None:
        values |= result.statistics._asdict()
    if "mean_logits" in set(outputs) - asked:
        values["mean_logits"] = mean_logits(inputs, config.options.logit_scale, labels.gather)
    results = [
        # no view: autograd forbids in-place changes of the views that a function returns
        labels.scatter(values[name].clone()) if name in outputs else None
        for name in LogProbs._fields
    ]
    return results, result.gradients if in_forward else None


def log_probs_gradients_(
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
    return _gradients(config, inputs(), upstream)


def expected_upstream(config: ChunkConfig, row_weights: Tensor | None) -> Tensor:
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
    where these differ by more than rounding. Those are all n where they have most of the weight:
    what they added would be subtracted from what remains.
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


def _gradients(
    config: ChunkConfig, inputs: HeadInputs, upstream: UpstreamGradients
) -> list[Tensor | None]:
    """Compute the chunks once more, with the upstream gradients (n,) in place."""
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
