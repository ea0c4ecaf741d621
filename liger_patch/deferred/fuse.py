"""Read the record of deferred logits for the fused operators, and call them. N: rows, flat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.deferred.record import Step
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.deferred.tensor_parallel import is_dtensor, own_rows
from liger_patch.kernels.backend import autocast_to
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.linear_log_probs import LogProbs, linear_log_probs
from liger_patch.kernels.quantized_weight import QuantizedWeight

# "move" too, but the loss would be on another device
_SAME_VALUES = ("cast", "detach", "clone", "layout")


class Parts(NamedTuple):
    """What deferred logits are made of: linear products, a scale and a softcap.

    ``softcap * tanh(logit_scale * x / softcap)``, or ``logit_scale * x``, of ``x = linear(...)``,
    or of the sum of that and ``linear(*low_rank)``.

    Attributes:
        hidden_states: (..., H), the rows that were chosen.
        weight: (V, H).
        bias: (V,) or None.
        low_rank: (..., R) and (V, R) of the adapters on the head, or None.
        logit_scale: 1.0 for none.
        softcap: None for none.
        autocast_dtype: of the head's call, None without autocast.
    """

    hidden_states: Tensor
    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    low_rank: tuple[Tensor, Tensor] | None
    logit_scale: float
    softcap: float | None
    autocast_dtype: torch.dtype | None


class _Term(NamedTuple):
    """``scale * linear(states, weight, bias)``: one of the products that logits are a sum of.

    Attributes:
        differentiable: False if the product, or a step after it, was made without gradients.
    """

    states: Tensor
    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    scale: float
    dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    differentiable: bool


def parts_of(logits: DeferredLogits) -> Parts | None:
    """Return what a fused loss needs; None where the steps are not sums, a scale and a softcap."""
    chain = logits.recorded_steps()
    if chain is None:
        return None
    before = next((i for i, s in enumerate(chain) if s.kind == "tanh"), len(chain))
    terms = _terms(logits, chain[:before])
    if terms is None:
        return None
    cap_scale = 1.0
    for step in chain[before + 1 :]:
        if step.kind == "scale":
            cap_scale *= step.factor
        elif step.kind == "rows":
            terms = _chosen(terms, step)
        elif step.kind not in _SAME_VALUES:
            return None
    product = _main_and_low_rank(terms)
    if product is None or cap_scale <= 0:
        return None
    main, low_rank = product
    parts = Parts(
        main.states, main.weight, main.bias, low_rank, main.scale, None, main.autocast_dtype
    )
    if before == len(chain):
        return parts
    # b * tanh(a * x) = softcap * tanh(logit_scale * x / softcap) with softcap = b, logit_scale
    # = a * b
    return parts._replace(logit_scale=main.scale * cap_scale, softcap=cap_scale)


def fused_loss(parts: Parts, labels: Tensor, **options: Any) -> Tensor:
    """Compute the loss of N rows and labels (N,); options of ``linear_cross_entropy``."""
    with _arguments(parts) as arguments:
        return linear_cross_entropy(**arguments, labels=labels, **options)


def fused_log_probs(parts: Parts, labels: Tensor, **options: Any) -> LogProbs:
    """Compute log-probabilities of labels (N,); options of ``linear_log_probs``."""
    with _arguments(parts) as arguments:
        return linear_log_probs(**arguments, labels=labels, **options)


@contextmanager
def _arguments(parts: Parts) -> Iterator[dict[str, Any]]:
    """Give the arguments of the operators, in the autocast state of the head's call."""
    weight, bias, shard = own_rows(parts.weight, parts.bias)
    states, low_rank_weight = parts.low_rank or (None, None)
    low_rank = None if states is None else (states.reshape(-1, states.shape[-1]), low_rank_weight)
    with autocast_to(parts.weight.device.type, parts.autocast_dtype):
        yield {
            "hidden_states": parts.hidden_states.reshape(-1, parts.hidden_states.shape[-1]),
            "weight": weight,
            "bias": bias,
            "low_rank": low_rank,
            "vocab_shard": shard,
            "softcap": parts.softcap,
            "logit_scale": parts.logit_scale,
        }


def _terms(logits: DeferredLogits, chain: list[Step]) -> list[_Term] | None:
    """Return the products after these steps; None where they are no sum of products, or where eager
    adds the products in a wider dtype than their own.
    """
    call = logits.head_call
    terms = [
        _Term(
            logits.rows,  # the rows of the first product have been chosen already
            call.weight,
            call.bias,
            1.0,
            call.dtype,
            call.autocast_dtype,
            call.grad_enabled,
        )
    ]
    is_wider = False
    for step in chain:
        if step.kind == "scale":
            terms = [term._replace(scale=term.scale * step.factor) for term in terms]
        elif step.kind == "rows":
            terms = _chosen(terms, step)
        elif isinstance(step.other, DeferredLogits):
            others_chain = step.other.recorded_steps()
            others = None if others_chain is None else _terms(step.other, others_chain)
            if others is None:
                return None
            terms += others
            is_wider = _is_wider(step, terms)
        elif step.kind not in _SAME_VALUES:
            return None
        if step.kind == "cast":
            is_wider = is_wider and _is_wider(step, terms)
        if step.kind == "detach" or not step.grad_enabled:
            terms = [term._replace(differentiable=False) for term in terms]
    return None if is_wider else terms


def _is_wider(step: Step, terms: list[_Term]) -> bool:
    """Return whether the dtype of the step's result is wider than that of one of the products."""
    narrowest = min(term.dtype.itemsize for term in terms)
    return step.dtype is not None and step.dtype.itemsize > narrowest


def _chosen(terms: list[_Term], step: Step) -> list[_Term]:
    """Return the terms after a choice of rows. The first term's rows have been chosen already."""
    return terms[:1] + [term._replace(states=step.apply(term.states)) for term in terms[1:]]


def _main_and_low_rank(
    terms: list[_Term],
) -> tuple[_Term, tuple[Tensor, Tensor] | None] | None:
    """Return the main product with all biases, and all others as one pair (..., R) and (V, R).

    The main product is the quantized one, or the one with most features. The states of the others
    are multiplied by their scale over that of the main one. None where this is not possible.
    """
    if len(terms) == 1:
        return terms[0], None
    if any(is_dtensor(term.weight) for term in terms):
        return None  # an adapter on a head whose vocabulary is distributed
    quantized = [term for term in terms if not isinstance(term.weight, Tensor)]
    widths = [term.weight.shape[1] for term in quantized or terms]
    main = (quantized or terms)[widths.index(max(widths))]  # Dynamo traces no key of max
    others = [term for term in terms if term is not main]
    if len(quantized) > 1 or main.scale == 0:
        return None
    if any(
        (t.differentiable, t.autocast_dtype) != (main.differentiable, main.autocast_dtype)
        for t in others
    ):
        return None
    states, weights, bias = [], [], main.bias
    for term in others:
        relative = term.scale / main.scale
        states.append(term.states if relative == 1 else relative * term.states)
        weights.append(term.weight)
        if term.bias is not None:
            scaled = relative * term.bias
            bias = scaled if bias is None else bias + scaled
    if bias is not None and bias is not main.bias:
        bias = bias.to(main.states.dtype)
    if len(others) == 1:
        return main._replace(bias=bias), (states[0], weights[0])
    return main._replace(bias=bias), (torch.cat(states, -1), torch.cat(weights, -1))
