"""Read the record of deferred logits for the fused operators, and call them. N: rows, flat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.deferred.record import Step
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.deferred.tensor_parallel import is_dtensor, own_rows
from liger_patch.kernels.backend import autocast_to
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.linear_log_probs import LogProbs, linear_log_probs, mean_logits

# "move" too, but the loss would be on another device
_SAME_VALUES = ("cast", "detach", "clone", "layout")


class HeadProduct(NamedTuple):
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
    weight: Tensor
    bias: Tensor | None
    low_rank: tuple[Tensor, Tensor] | None
    logit_scale: float
    softcap: float | None
    autocast_dtype: torch.dtype | None


@dataclass(frozen=True)
class Decision:
    """Whether a loss is fused: with the head's product, or not, for a reason."""

    product: HeadProduct | None = None
    reason: str | None = None


class _Product(NamedTuple):
    """``scale * linear(states, weight, bias)``: one of the products that logits are a sum of.

    Attributes:
        differentiable: False if the product, or a step after it, was made without gradients.
    """

    states: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float
    dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    differentiable: bool


def read_record(logits: DeferredLogits) -> HeadProduct | None:
    """Return what a fused loss needs; None where the steps are not sums, a scale and a softcap."""
    chain = logits.recorded_steps()
    if chain is None:
        return None
    kinds = [step.kind for step in chain]
    before = kinds.index("tanh") if "tanh" in kinds else len(chain)
    products = _products(logits, chain[:before])
    if products is None:
        return None
    cap_scale = 1.0
    for step in chain[before + 1 :]:
        if step.kind == "scale":
            cap_scale *= step.factor
        elif step.kind == "rows":
            products = _chosen(products, step)
        elif step.kind not in _SAME_VALUES:
            return None
    joined = _main_and_low_rank(products)
    if joined is None or cap_scale <= 0:
        return None
    main, low_rank = joined
    product = HeadProduct(
        main.states, main.weight, main.bias, low_rank, main.scale, None, main.autocast_dtype
    )
    if before == len(chain):
        return product
    # b * tanh(a * x) = softcap * tanh(logit_scale * x / softcap) with softcap = b, logit_scale
    # = a * b
    return product._replace(logit_scale=main.scale * cap_scale, softcap=cap_scale)


def fused_loss(product: HeadProduct, labels: Tensor, **options: Any) -> Tensor:
    """Compute the loss of N rows and labels (N,); options of ``linear_cross_entropy``."""
    with autocast_to(product.weight.device.type, product.autocast_dtype):
        return linear_cross_entropy(**operator_arguments(product), labels=labels, **options)


def fused_log_probs(product: HeadProduct, labels: Tensor, **options: Any) -> LogProbs:
    """Compute log-probabilities of labels (N,); options of ``linear_log_probs``."""
    with autocast_to(product.weight.device.type, product.autocast_dtype):
        return linear_log_probs(**operator_arguments(product), labels=labels, **options)


def mean_of_all_logits(product: HeadProduct) -> Tensor | None:
    """Return (N,), the mean over the vocabulary of each row's logits, without computing the logits;
    None with a softcap, or a vocabulary that is distributed over ranks.
    """
    if product.softcap is not None or is_dtensor(product.weight):
        return None
    states, low_rank_weight = product.low_rank or (None, None)
    inputs = HeadInputs(*product[:3], states, low_rank_weight)
    with torch.no_grad():
        return mean_logits(inputs, product.logit_scale, lambda rows: rows.flatten(0, -2))


def operator_arguments(product: HeadProduct) -> dict[str, Any]:
    """Return the arguments of the operators."""
    weight, bias, shard = own_rows(product.weight, product.bias)
    states, low_rank_weight = product.low_rank or (None, None)
    return {
        "hidden_states": product.hidden_states.reshape(-1, product.hidden_states.shape[-1]),
        "weight": weight,
        "bias": bias,
        "low_rank": None if states is None else (states.flatten(0, -2), low_rank_weight),
        "vocab_shard": shard,
        "softcap": product.softcap,
        "logit_scale": product.logit_scale,
    }


def _products(logits: DeferredLogits, chain: list[Step]) -> list[_Product] | None:
    """Return the products after these steps; None where they are no sum of products, or where eager
    adds the products in a wider dtype than their own.
    """
    call = logits.head_call
    products = [
        _Product(
            logits.rows,  # the rows of the first product have been chosen already
            call.weight,
            call.bias,
            1.0,
            call.dtype,
            call.autocast_dtype,
            call.grad_enabled,
        )
    ]
    adds_in_wider_dtype = False
    for step in chain:
        if step.kind == "scale":
            products = [each._replace(scale=each.scale * step.factor) for each in products]
        elif step.kind == "rows":
            products = _chosen(products, step)
        elif isinstance(step.other, DeferredLogits):
            others_chain = step.other.recorded_steps()
            others = None if others_chain is None else _products(step.other, others_chain)
            if others is None:
                return None
            products += others
            adds_in_wider_dtype = _has_wider_result(step, products)
        elif step.kind not in _SAME_VALUES:
            return None
        if step.kind == "cast":
            adds_in_wider_dtype = adds_in_wider_dtype and _has_wider_result(step, products)
        if step.kind == "detach" or not step.grad_enabled:
            products = [each._replace(differentiable=False) for each in products]
    return None if adds_in_wider_dtype else products


def _has_wider_result(step: Step, products: list[_Product]) -> bool:
    """Return whether the dtype of the step's result is wider than that of one of the products."""
    narrowest = min(each.dtype.itemsize for each in products)
    return step.dtype is not None and step.dtype.itemsize > narrowest


def _chosen(products: list[_Product], step: Step) -> list[_Product]:
    """Return the products after a choice of rows. Those of the first are chosen already."""
    return products[:1] + [each._replace(states=step.apply(each.states)) for each in products[1:]]


def _main_and_low_rank(
    products: list[_Product],
) -> tuple[_Product, tuple[Tensor, Tensor] | None] | None:
    """Return the main product, and all others, without biases, as one pair (..., R) and (V, R).

    The main product is the one with most features. The states of the others are multiplied by their
    scale over that of the main one. None where this is not possible.
    """
    if len(products) == 1:
        return products[0], None
    if any(is_dtensor(each.weight) for each in products):
        return None  # an adapter on a head whose vocabulary is distributed
    widths = [each.weight.shape[1] for each in products]
    main = products[widths.index(max(widths))]  # Dynamo traces no key of max
    others = [each for each in products if each is not main]
    if main.scale == 0 or any(each.bias is not None for each in others):
        return None
    if any(
        (each.differentiable, each.autocast_dtype) != (main.differentiable, main.autocast_dtype)
        for each in others
    ):
        return None
    states, weights = [], []
    for each in others:
        relative = each.scale / main.scale
        states.append(each.states if relative == 1 else relative * each.states)
        weights.append(each.weight)
    if len(others) == 1:
        return main, (states[0], weights[0])
    return main, (torch.cat(states, -1), torch.cat(weights, -1))
