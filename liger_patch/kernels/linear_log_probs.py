"""Log-probabilities of labels under ``hidden_states @ weight.T``, without the (N, V) logits.

What trainers of preferences and rewards need of a head: per token, with what else is known of its
distribution (``token_statistics``). N: tokens, n: supervised tokens, H: hidden size, V: vocabulary.
The chunks are those of ``head_pass``.

Gradients are computed in the forward pass, as if the upstream gradient of every log-probability
were that of minus their mean, where that saves a product: with a frozen head each token's row is
scaled in the backward pass, two products of 2 n H V operations in all; with a trainable head the
sums over tokens are scaled where the upstream gradient is indeed the same for all tokens, three
products. Where it is not, the backward pass computes them again with the gradient that came, and so
it does for gradients of entropy and lse, for float16, and in a second backward pass over one graph.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.autocast import without_autocast
from liger_patch.kernels.compilation import runs_eagerly
from liger_patch.kernels.differentiation import check_backward
from liger_patch.kernels.head.arguments import checked_chunk_bytes, checked_inputs, product_dtype
from liger_patch.kernels.head.chunked import HeadPass
from liger_patch.kernels.head.inputs import HeadInputs, QuantizedWeight, Wanted, weight_slices
from liger_patch.kernels.head.labels import (
    Supervised,
    check_tokens,
    order_tokens,
    refuse_others_than_tensors,
)
from liger_patch.kernels.head.logits import UpstreamHead, prepare_head
from liger_patch.kernels.head.options import LossOptions
from liger_patch.kernels.head.pytorch import accumulation_dtype
from liger_patch.kernels.head.saved_inputs import save_inputs, saved_inputs
from liger_patch.kernels.head.scale import scale_
from liger_patch.kernels.head.statistics import UpstreamGradients

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


@dataclass(frozen=True)
class _Problem:
    """All that one call knows beside its inputs."""

    head_pass: HeadPass
    options: LossOptions
    outputs: frozenset[str]
    same_gradient: bool
    wanted: Wanted

    @property
    def gradients_in_forward(self) -> bool:
        """Whether gradients are computed now, for upstream gradients that can be expected."""
        if not any(self.wanted) or self.head_pass.dtype == torch.float16:
            return False
        return self.same_gradient or not self.wanted.sums

    def expected_scale(self) -> Tensor:
        """() minus the gradient of each log-probability that is expected: of their mean."""
        count = self.head_pass.tokens.counts[0]
        return count.clamp(min=1).to(accumulation_dtype(self.head_pass.dtype)).reciprocal()


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, problem: _Problem, *inputs: Any):
        ctx.set_materialize_grads(False)
        wanted = problem.wanted if problem.gradients_in_forward else Wanted()
        tokens, head_inputs = problem.head_pass.tokens, HeadInputs(*inputs)
        scale = problem.expected_scale()
        needs_rows = problem.options.softcap is not None
        asked = problem.outputs - {"log_probs"} - (set() if needs_rows else {"mean_logits"})
        make_head = partial(prepare_head, tokens=tokens, options=problem.options, statistics=asked)
        with without_autocast(head_inputs.hidden_states.device.type):
            row_scale = scale.expand(len(tokens.labels)).contiguous()
            head, supervised, gradients = problem.head_pass.run(
                head_inputs, make_head, row_scale, wanted
            )
            n = len(supervised.labels)
            values = {"log_probs": -head.losses[:n]}
            if head.statistics is not None:
                values |= head.statistics.of(slice(n))._asdict()
            if "mean_logits" in problem.outputs - asked:
                values["mean_logits"] = _mean_logits(head_inputs, supervised, problem.options)
        ctx.problem, ctx.supervised, ctx.scale = problem, supervised, scale
        ctx.gradients = gradients if problem.gradients_in_forward else None
        save_inputs(ctx, inputs, problem.options)
        results = [
            # a result of its own, no view: autograd lets nobody change those in place
            supervised.scatter(values[name].clone()) if name in problem.outputs else None
            for name in LogProbs._fields
        ]
        ctx.mark_non_differentiable(*(r for r in (results[2], *results[4:]) if r is not None))
        return tuple(results)

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):
        check_backward("linear_log_probs", *upstream)
        problem: _Problem = ctx.problem
        supervised: Supervised = ctx.supervised
        dlog_probs, dentropy, _, dlse, *_ = (
            None if each is None else supervised.gather(each) for each in upstream
        )
        # given away: a second backward pass computes its own
        gradients, ctx.gradients = ctx.gradients, None
        if dentropy is None and dlse is None and dlog_probs is not None:
            if gradients is not None and not problem.wanted.sums:
                supervised.scale_rows_(gradients, -dlog_probs / ctx.scale)
                return None, *gradients
            # the one place that waits for the device: gradients of sums cannot be mended
            if gradients is not None and _is_one_number(dlog_probs):
                if len(dlog_probs):
                    present = [each for each in gradients if each is not None]
                    scale_(present, -dlog_probs[0] / ctx.scale)
                return None, *gradients
        del gradients
        return None, *_gradients(ctx, UpstreamGradients(dlog_probs, dentropy, dlse))


def _is_one_number(gradient: Tensor) -> bool:
    return gradient.is_meta or bool((gradient == gradient[:1]).all())


def _gradients(ctx: Any, upstream: UpstreamGradients) -> list[Tensor | None]:
    """Through all chunks once more, with the upstream gradients (n,) in place."""
    problem: _Problem = ctx.problem
    supervised: Supervised = ctx.supervised
    tokens, (inputs, _) = problem.head_pass.tokens, saved_inputs(ctx)
    dlog_probs, dentropy, dlse = upstream
    row_scale = torch.zeros_like(supervised.labels) if dlog_probs is None else -dlog_probs
    if dentropy is None and dlse is None:
        make_head = partial(prepare_head, tokens=tokens, options=problem.options)
    else:
        make_head = partial(
            UpstreamHead,
            tokens=tokens,
            options=problem.options,
            upstream=UpstreamGradients(*(u if u is None else u.contiguous() for u in upstream)),
        )
    row_scale = row_scale.to(accumulation_dtype(problem.head_pass.dtype)).contiguous()
    with without_autocast(inputs.hidden_states.device.type):
        passed = problem.head_pass.run(inputs, make_head, row_scale, problem.wanted, supervised)
    return passed.gradients


def _mean_logits(inputs: HeadInputs, supervised: Supervised, options: LossOptions) -> Tensor:
    """(n,) the mean over the vocabulary of logits without a softcap: linear in the weight."""
    total = None
    for states, weight in inputs.products():
        dtype = accumulation_dtype(states.dtype)
        rows = torch.stack([part.sum(0, dtype=dtype) for _, part in weight_slices(weight)]).sum(0)
        slabs = supervised.gather(states).split(SLAB)
        product = torch.cat([slab.to(dtype) @ rows for slab in slabs])
        total = product if total is None else total + product
    assert total is not None
    if inputs.bias is not None:
        total = total + inputs.bias.sum(dtype=total.dtype)
    return total * (options.logit_scale / inputs.weight.shape[0])


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
) -> LogProbs:
    """``log_softmax(linear(hidden_states, weight, bias))`` at the labels, without (N, V) logits.

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

    Returns:
        Per token, (N,): float32 (float64 for float64 inputs), ``is_top1`` bool.

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit, a label outside the
            vocabulary.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    refuse_others_than_tensors(hidden_states=hidden_states, bias=bias, labels=labels)
    inputs = checked_inputs(hidden_states, weight, bias, low_rank)
    wanted = Wanted.by(inputs)
    chunk_bytes = checked_chunk_bytes(chunk_mib, trains_weight=wanted.weight)
    if not isinstance(temperature, Real) or not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a finite number > 0, got {temperature!r}")
    names = {outputs} if isinstance(outputs, str) else outputs
    if not isinstance(names, Collection) or any(n not in LogProbs._fields for n in names):
        raise ValueError(f"outputs must be among {LogProbs._fields}, got {outputs!r}")
    LossOptions(ignore_index, softcap, logit_scale)  # refuses what is no number
    # softcap / T * tanh(logit_scale / T * x / (softcap / T)): temperature is no option of its own
    cap = None if softcap is None else softcap / temperature
    options = LossOptions(ignore_index, cap, logit_scale / temperature)
    check_tokens(
        labels,
        len(hidden_states),
        hidden_states.device,
        reduction="none",
        token_weight=None,
        num_items_in_batch=None,
    )
    dtype = product_dtype(inputs)
    problem = _Problem(
        HeadPass(order_tokens(labels, weight.shape[0], ignore_index), dtype, chunk_bytes),
        options,
        frozenset({*names, "log_probs"}),
        same_gradient,
        wanted,
    )
    return LogProbs(*_LinearLogProbs.apply(problem, *inputs))
