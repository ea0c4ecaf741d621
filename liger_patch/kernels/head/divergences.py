"""The divergence of a student from a teacher, from rows of their logits, and its gradient in place.

    s = log_softmax(z / T),  t = log_softmax(teacher's z / T),  q = exp(s),  p = exp(t)

    forward_kl  sum p (t - s)
    reverse_kl  sum q (s - t)
    jsd         beta sum p (t - log m) + (1 - beta) sum q (s - log m),  m = beta p + (1 - beta) q
    tvd         sum |p - q| / 2

with z the logits after scale and softcap (``options``) and T the temperature, plus ``ce_weight``
times the cross entropy of z, without the temperature. The generalized JSD: GKD (arXiv:2306.13649);
its limits beta = 0 and 1 are, as there and in TRL, forward and reverse KL.

Between near-equal distributions, terms of p and q almost cancel. So everything is computed from
d = t - s: q - p = p expm1(-d), and a KL as sum (p d + q - p), whose terms are not negative. C:
rows, V: classes of both.
"""

from dataclasses import dataclass, replace
from numbers import Real

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, serves_triton
from liger_patch.kernels.head.row_sums import (
    BASIC,
    RowGradients,
    RowSums,
    blocks_of_rows,
    row_gradients_,
    row_sums,
    z_and_slope,
)
from liger_patch.kernels.options import LossOptions, is_finite

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd")
LOWEST = -1e30  # log-probability of a class whose logit is -inf: -inf - -inf is nan
NEAR = 0.3  # |d| up to which q - p is p expm1(-d): beyond, the difference does not cancel
FAR = 80.0  # bound of |d|, so that exp(d) is finite: beyond, one of p and q is below 1e-34
COPIES = 12  # of a block of rows that live at once


@dataclass(frozen=True)
class Divergence:
    """What is computed of each token.

    Attributes:
        kind: one of DIVERGENCES.
        beta: of the JSD, in [0, 1]: the teacher's share of the mixture.
        temperature: > 0, divides the logits of both.
        ce_weight: >= 0, factor of the cross entropy that is added.

    Raises:
        ValueError: names the option, its value and what was expected.
    """

    kind: str = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    ce_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in DIVERGENCES:
            raise ValueError(f"divergence must be one of {DIVERGENCES}, got {self.kind!r}")
        for name in ("beta", "temperature", "ce_weight"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number or not is_finite(value):  # pyright: ignore[reportArgumentType]
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        if not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"beta must be in [0, 1], got {self.beta}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}")
        if self.ce_weight < 0:
            raise ValueError(f"ce_weight must be >= 0, got {self.ce_weight}")

    @property
    def form(self) -> str:
        """Return the kind, with the limits of the JSD as the KL that they are."""
        if self.kind == "jsd" and self.beta in (0, 1):
            return DIVERGENCES[int(self.beta)]
        return self.kind


def checked_divergence(
    kind: str,
    beta: float | None,
    temperature: float,
    ce_weight: float,
    reduction: str,
    labels: Tensor | None,
) -> Divergence:
    """Return what these options of ``linear_distillation`` ask for.

    Raises:
        ValueError: names the option, its value and what was expected.
    """
    if beta is not None and kind in DIVERGENCES and kind != "jsd":
        raise ValueError(f'beta must be None, or divergence "jsd", got {beta!r} for {kind!r}')
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    if labels is None and ce_weight:
        raise ValueError(f"ce_weight={ce_weight} needs labels, got None")
    return Divergence(kind, 0.5 if beta is None else beta, temperature, ce_weight)


def divergence_rows_(
    student: Tensor,  # (C, V)
    teacher: Tensor,  # (C, V)
    labels: Tensor,  # (C,) in [0, V), read for the cross entropy only
    options: LossOptions,
    teacher_options: LossOptions,
    divergence: Divergence,
    row_scale: Tensor | None,  # (C,)
    entropies: Tensor | None,  # (C,)
) -> Tensor:
    """Return the losses (C,) of raw logits, and write the entropies of the student. With
    ``row_scale``, overwrite the student's logits with the gradient of ``row_scale * losses``.
    """
    how = options, teacher_options, divergence
    if serves_triton(student, teacher):
        from liger_patch.kernels.triton.distillation import divergence_rows_ as on_triton

        numbers = divergence.temperature, divergence.beta, divergence.ce_weight
        what = options, teacher_options, DIVERGENCES.index(divergence.form), *numbers
        return on_triton(student, teacher, labels, *what, row_scale, entropies)
    dtype = accumulation_dtype(torch.promote_types(student.dtype, teacher.dtype))
    losses = student.new_empty(len(student), dtype=dtype)
    for part in blocks_of_rows(student, COPIES):
        x, y = student[part].to(dtype), teacher[part].to(dtype)
        losses[part], gradient, entropy = _block(x, y, labels[part, None], *how)
        if entropies is not None:
            entropies[part] = entropy
        if row_scale is not None:
            student[part] = gradient.mul_(row_scale[part, None] * options.logit_scale)
    return losses


def _block(
    x: Tensor,
    y: Tensor,
    labels: Tensor,  # (C, 1)
    options: LossOptions,
    teacher_options: LossOptions,
    divergence: Divergence,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses (C,), their gradient over the logit scale (C, V), and entropies (C,)."""
    z, slope = z_and_slope(x, options)
    s = (z / divergence.temperature).log_softmax(1).clamp_(min=LOWEST)
    t, _ = z_and_slope(y, teacher_options)
    t = t.div_(divergence.temperature).log_softmax(1).clamp_(min=LOWEST)
    values, gradient = _terms(s, t, divergence)
    entropy = -(s.exp() * s).sum(1)
    losses, gradient = values.sum(1), gradient.div_(divergence.temperature)
    if divergence.ce_weight:
        log_probs = z.log_softmax(1)
        probs = log_probs.exp()
        losses = losses - divergence.ce_weight * log_probs.gather(1, labels)[:, 0]
        others = probs.scatter_(1, labels, 0.0).sum(1, keepdim=True)  # p - 1 would cancel
        gradient.add_(probs.scatter_(1, labels, -others), alpha=divergence.ce_weight)
    return losses, gradient if slope is None else gradient.mul_(slope), entropy


def _terms(s: Tensor, t: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
    """Return the terms of the divergence (C, V), and its gradient by the logits over T."""
    d, q, p = t - s, s.exp(), t.exp()
    difference = torch.where(d.abs() < NEAR, p * torch.expm1(-d), q - p)
    form, beta = divergence.form, divergence.beta
    if form == "forward_kl":
        return p * d + difference, difference
    if form == "reverse_kl":
        slopes = -d
        values = q * slopes - difference
    elif form == "jsd":
        d = d.clamp(-FAR, FAR)
        slopes = (beta - 1) * torch.log1p(beta * torch.expm1(d))
        values = q * slopes - beta * p * torch.log1p((1 - beta) * torch.expm1(-d))
    else:
        slopes = 0.5 * difference.sign()
        values = 0.5 * difference.abs()
    # where q is near 1, slope and mean are nearly the same: q sums to 1 up to rounding only
    mean = (q * slopes).sum(1, keepdim=True) / q.sum(1, keepdim=True)
    return values, q * (slopes - mean)


def top_k_rows_(
    logits: Tensor,  # (C, V)
    log_probs: Tensor,  # (C, K)
    indices: Tensor,  # (C, K) distinct in each row
    options: LossOptions,
    temperature: float,
    tail: bool,
    row_scale: Tensor | None,  # (C,)
) -> Tensor:
    """Return the losses (C,) of raw logits where only the teacher's likeliest classes are known:

        loss = sum_k p_k (t_k - s_k), with a tail + p_tail (log p_tail - log q_tail)

    with p_tail = 1 - sum_k p_k and q_tail likewise. With ``row_scale``, overwrite the logits with
    the gradient of ``row_scale * losses``. By the logits over the temperature that is q f - p at
    the K classes, and q r elsewhere: f = r = sum_k p_k, with a tail f = 1 and
    r = 1 - p_tail / q_tail.
    """
    # softcap / T * tanh(logit_scale / T * x / (softcap / T)): see ``linear_log_probs``
    softcap = None if options.softcap is None else options.softcap / temperature
    options = replace(options, softcap=softcap, logit_scale=options.logit_scale / temperature)
    no_labels = indices.new_full((len(indices),), -1)
    sums = RowSums(*row_sums(logits, no_labels, options, None, BASIC))
    z, slope = z_and_slope(logits.gather(1, indices), options)
    s = (z - sums.highest[:, None]) - sums.others.log()[:, None]
    s, t = s.clamp(min=LOWEST), log_probs.to(s.dtype).clamp(min=LOWEST)  # 0 * -inf is nan
    q, p = s.exp(), t.exp()
    losses, within = (p * (t - s)).sum(1), p.sum(1)
    elsewhere = within
    if tail:
        p_tail = (1.0 - within).clamp(min=0.0)
        q_tail = (1.0 - q.sum(1)).clamp(min=torch.finfo(q.dtype).eps)
        losses = losses + torch.xlogy(p_tail, p_tail / q_tail)
        within = within + p_tail
        elsewhere = within - p_tail / q_tail
    if row_scale is not None:
        scale = row_scale * options.logit_scale
        gradient = (q * within[:, None] - p) * scale[:, None]
        gradient = gradient if slope is None else gradient * slope
        factors = (elsewhere * scale / sums.others).contiguous()
        rest = RowGradients(sums.highest, factors, torch.zeros_like(factors))
        row_gradients_(logits, no_labels, options, None, rest)
        logits.scatter_(1, indices, gradient.to(logits.dtype))
    return losses
