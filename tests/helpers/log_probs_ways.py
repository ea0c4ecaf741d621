"""Log-probabilities three ways on the same values, as ``three_ways`` has one loss: ours, eager
PyTorch in the same dtype, and in float64; and the cases that tests ask for. N: tokens.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import truths
from exactness import error
from three_ways import Results, dtype_of, hold, labels_in_order, logits_in_order, paired, three
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype
from liger_patch.kernels.linear_log_probs import LogProbs, linear_log_probs

FIELDS = LogProbs._fields
DIFFERENTIABLE = ("log_probs", "entropy", "lse")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of inputs, and of options
    "plain": ({}, {}),
    "softcap": ({}, {"softcap": 5.0}),
    "logit_scale": ({}, {"logit_scale": 0.3}),
    "temperature": ({}, {"temperature": 0.7}),
    "softcap_temperature": ({}, {"softcap": 5.0, "logit_scale": 0.5, "temperature": 1.6}),
    "bias": ({"bias": True}, {}),
    "adapter": ({"rank": 4}, {}),
}
UPSTREAM: dict[str, Callable[[int], dict[str, Tensor]]] = {  # gradients of the results, (N,)
    "mean": lambda n: {"log_probs": torch.full((n,), -1 / max(n, 1))},
    "sum": lambda n: {"log_probs": torch.ones(n)},
    "sum_times": lambda n: {"log_probs": torch.full((n,), -3.7)},
    "per_token": lambda n: {"log_probs": torch.randn(n)},
    "zero_for_some": lambda n: {"log_probs": torch.randn(n) * (torch.arange(n) % 3 > 0)},
    "entropy": lambda n: {"entropy": torch.randn(n)},
    "lse": lambda n: {"lse": torch.randn(n)},
    "entropy and lse": lambda n: {name: torch.randn(n) for name in ("entropy", "lse")},
    "log_probs and lse": lambda n: {name: torch.randn(n) for name in ("log_probs", "lse")},
    "log_probs and entropy": lambda n: {name: torch.randn(n) for name in ("log_probs", "entropy")},
    "all": lambda n: {name: torch.randn(n) for name in DIFFERENTIABLE},
}


def upstream_of(kind: str, labels: Tensor) -> dict[str, Tensor]:
    return {name: u.to(labels.device) for name, u in UPSTREAM[kind](len(labels)).items()}


def bent(
    logits: Tensor, softcap: float | None = None, logit_scale: float = 1.0, temperature: float = 1.0
) -> Tensor:
    """Logits as the softmax sees them, upcast to float32 as Transformers does."""
    z = logits.to(accumulation_dtype(logits.dtype)) * logit_scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


def eager_log_probs(
    logits: Tensor,  # (N, V)
    labels: Tensor,  # (N,)
    **options: Any,
) -> LogProbs:
    """PyTorch's own softmax of ``bent`` logits; labels of -100 are ignored."""
    z = bent(logits, **options)
    supervised = labels != -100
    labels = torch.where(supervised, labels, 0)[:, None]
    log_p = z.log_softmax(-1)
    values = LogProbs(
        log_probs=log_p.gather(-1, labels)[:, 0],
        entropy=-(log_p.exp() * log_p).sum(-1),
        is_top1=z.argmax(-1) == labels[:, 0],
        lse=z.logsumexp(-1),
        mean_logits=z.mean(-1),
        log_sum_sq_probs=(2 * log_p).logsumexp(-1),
    )
    return LogProbs(*(v.masked_fill(~supervised, 0) for v in values))


def check_log_probs(
    inputs: Mapping[str, Tensor],
    labels: Tensor,
    *,
    upstream: Mapping[str, Tensor] | None = None,
    frozen: Collection[str] = (),
    outputs: Collection[str] = FIELDS,
    chunk_mib: float | None = None,
    same_gradient: bool = True,
    row_weights: Tensor | None = None,
    operator: Callable[..., LogProbs] | None = None,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> Results:
    """Hold ``linear_log_probs`` to the rule; its results and gradients are returned.

    ``upstream``: 1 for each log-probability if not given.
    """
    if upstream is None:
        upstream = {"log_probs": torch.ones(len(labels), device=labels.device)}
    how = {"outputs": outputs, "chunk_mib": chunk_mib, "same_gradient": same_gradient}
    how |= {"row_weights": row_weights}
    asked = [name for name in FIELDS if name in outputs or name == "log_probs"]

    def ours(**x: Tensor) -> LogProbs:
        results = (operator or linear_log_probs)(**paired(x), labels=labels, **how, **options)
        is_graph = any(each.requires_grad for each in x.values())
        for name, value in results._asdict().items():
            assert (value is not None) == (name in asked), name
            if value is not None:
                dtype = torch.bool if name == "is_top1" else accumulation_dtype(dtype_of(inputs))
                assert (value.dtype, value.shape) == (dtype, labels.shape), name
                assert value.requires_grad == (is_graph and name in DIFFERENTIABLE), name
        return results

    def truth(**x: Tensor) -> LogProbs:
        return truths.linear_log_probs(**paired(x), labels=labels.long(), **options)

    def eager(order: int, **x: Tensor) -> LogProbs:
        logits, rows, classes = logits_in_order(order, **x)
        how = dict(options)
        placed = labels_in_order(labels, classes, how.pop("ignore_index", -100))
        results = eager_log_probs(logits, placed[rows], **how)
        return LogProbs(*(each[rows.argsort()] for each in results))

    ways = three(ours, eager, truth, inputs, upstream, frozen, autocast)
    (our, _, exact), dtype = ways, autocast or dtype_of(inputs)
    names = [name for name in exact if name in asked or name not in FIELDS]
    if "is_top1" in names:
        names.remove("is_top1")
        certain = _certain(inputs, labels, options, dtype)
        assert torch.equal(our["is_top1"][certain], exact["is_top1"][certain])
    hold(*({name: way[name] for name in names} for way in ways), dtype)
    return our


def _certain(
    inputs: Mapping[str, Tensor], labels: Tensor, options: Mapping[str, Any], dtype: torch.dtype
) -> Tensor:
    """(N,) where logits as exact as the rule asks for cannot differ in whether the label is the
    most likely class.
    """
    options = dict(options)
    supervised = labels != options.pop("ignore_index", -100)
    z, exact = (
        bent(logits_in_order(0, **{name: x.to(each) for name, x in inputs.items()})[0], **options)
        for each in (dtype, torch.float64)
    )
    label = torch.where(supervised, labels, 0).long()[:, None]
    margin = exact.gather(1, label) - exact.scatter(1, label, -torch.inf).amax(1, keepdim=True)
    largest = exact.abs().max() if len(labels) else 0.0
    allowed = 2 * error(z, exact) + torch.finfo(dtype).eps * largest
    return ~supervised | (margin[:, 0].abs() > 2 * allowed)
