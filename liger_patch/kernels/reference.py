"""The specification: the losses of this package in plain PyTorch, for any floating dtype,
differentiated by autograd, and the masks of its attention.

Every other form is tested against this one in float64. It holds the whole (N, V) logits, or the
(T, T) mask of an attention: for tests, checks and fallbacks. The formulas are in ``options``,
``head/divergences`` and ``segments``; softcap as in Gemma 2 (arXiv:2408.00118), z-loss as in PaLM
(arXiv:2204.02311).
"""

import math

import torch
from torch import Tensor

from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.segments import Segments


def cross_entropy(
    logits: Tensor,  # (N, V)
    labels: Tensor,  # (N,)
    *,
    reduction: str = "mean",
    token_weight: Tensor | None = None,  # (N,)
    num_items_in_batch: Tensor | int | None = None,
    options: LossOptions | None = None,
) -> Tensor:
    """Compute the loss of ready-made logits, in their dtype: () for "mean" and "sum", (N,) for
    "none".
    """
    options = options or LossOptions()
    vocab_size = logits.shape[-1]
    ones = logits.new_ones(vocab_size)
    class_weight = ones if options.class_weight is None else options.class_weight.to(logits.dtype)
    token_weight = (
        logits.new_ones(len(labels)) if token_weight is None else token_weight.to(logits.dtype)
    )

    supervised = labels != options.ignore_index
    logits, labels, token_weight = logits[supervised], labels[supervised], token_weight[supervised]
    z = scaled_and_capped(logits, options.logit_scale, options.softcap)
    lse = torch.logsumexp(z, dim=-1)
    z_labels = z.gather(-1, labels[:, None])[:, 0]
    others = z.scatter(-1, labels[:, None], torch.finfo(z.dtype).min)
    gaps = torch.logsumexp(others, dim=-1) - z_labels
    nll = torch.logaddexp(gaps, torch.zeros_like(gaps))  # lse - z_labels, which cancels near p = 1
    losses = (1 - options.label_smoothing) * class_weight[labels] * nll
    if options.label_smoothing:  # otherwise a logit of -inf would give 0 * inf
        smooth = (class_weight * (lse[:, None] - z)).sum(-1) / vocab_size
        losses = losses + options.label_smoothing * smooth
    if options.z_loss:  # otherwise a lse whose square overflows would give 0 * inf
        losses = losses + options.z_loss * lse**2
    losses = token_weight * losses

    if reduction == "none":
        return losses.new_zeros(len(supervised)).masked_scatter(supervised, losses)
    if reduction == "sum":
        return losses.sum()
    denominator, in_place_of_0 = (token_weight * class_weight[labels]).sum(), torch.inf
    if num_items_in_batch is not None:
        denominator = torch.as_tensor(num_items_in_batch, dtype=losses.dtype, device=losses.device)
        denominator, in_place_of_0 = denominator.reshape(()), 1.0
    return losses.sum() / denominator.masked_fill(denominator == 0, in_place_of_0)


def linear_cross_entropy(
    hidden_states: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    *,
    bias: Tensor | None = None,  # (V,)
    low_rank: tuple[Tensor, Tensor] | None = None,  # (N, R), (V, R)
    reduction: str = "mean",
    token_weight: Tensor | None = None,  # (N,)
    num_items_in_batch: Tensor | int | None = None,
    options: LossOptions | None = None,
) -> Tensor:
    """Compute ``cross_entropy`` of ``linear(hidden_states, weight, bias) + linear(*low_rank)``."""
    return cross_entropy(
        head_logits(hidden_states, weight, bias, low_rank),
        labels,
        reduction=reduction,
        token_weight=token_weight,
        num_items_in_batch=num_items_in_batch,
        options=options,
    )


def distillation(
    student: Tensor,  # (N, V) logits
    teacher: Tensor,  # (N, V) logits
    labels: Tensor | None = None,  # (N,)
    *,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    ce_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    token_weight: Tensor | None = None,  # (N,)
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Compute the loss of ``linear_distillation`` of ready-made logits, in their dtype."""
    common = min(student.shape[1], teacher.shape[1])
    z = scaled_and_capped(student[:, :common], logit_scale, softcap)
    teacher_z = scaled_and_capped(teacher[:, :common], teacher_logit_scale, teacher_softcap)
    s = torch.log_softmax(z / temperature, -1)
    t = torch.log_softmax(teacher_z.detach() / temperature, -1)
    of_limits = {0: "forward_kl", 1: "reverse_kl"}
    form = of_limits.get(beta, "jsd") if divergence == "jsd" else divergence  # pyright: ignore
    if form == "forward_kl":
        terms = t.exp() * (t - s)
    elif form == "reverse_kl":
        terms = s.exp() * (s - t)
    elif form == "jsd":
        m = torch.logaddexp(t + math.log(beta), s + math.log1p(-beta))
        terms = beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)
    else:
        terms = (t.exp() - s.exp()).abs() / 2
    losses = terms.sum(-1)
    weights = torch.ones_like(losses) if token_weight is None else token_weight.to(losses.dtype)
    if labels is not None:
        supervised = labels != ignore_index
        weights = weights * supervised
        label_log_p = torch.log_softmax(z, -1).gather(-1, (labels * supervised).long()[:, None])
        losses = losses - ce_weight * label_log_p[:, 0]
    if reduction == "sum":
        return (losses * weights).sum()
    denominator, in_place_of_0 = weights.sum(), torch.inf
    if num_items_in_batch is not None:
        denominator = torch.as_tensor(num_items_in_batch, dtype=losses.dtype, device=losses.device)
        in_place_of_0 = 1.0
    return (losses * weights).sum() / denominator.masked_fill(denominator == 0, in_place_of_0)


def segment_mask(
    segments: Segments, rows: int, tokens: int, device: torch.device | None = None
) -> Tensor:
    """Return (rows, T, T) bool, True where a query sees a key, also one of its prefix."""
    place = torch.arange(rows * tokens, device=device)
    ends = torch.arange(0, rows * tokens + 1, tokens, device=device)
    if segments.cu_seqlens is not None:
        ends = segments.cu_seqlens
    sequence = torch.searchsorted(ends.to(place.dtype), place, right=True).view(rows, tokens)
    query, key = place[:tokens, None], place[:tokens]
    window = tokens if segments.window is None else segments.window
    mask = (sequence[:, :, None] == sequence[:, None]) & (key <= query) & (key > query - window)
    if segments.prefixes is None:
        return mask
    many, continued, ends, _ = segments.prefixes
    group, prefix = (
        torch.searchsorted(of.to(place.dtype), place[:count], right=True)
        for of, count in zip(ends, (continued, many), strict=True)
    )
    mask[:, many : many + continued, :many] = group[:, None] == prefix
    return mask


def head_logits(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    low_rank: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Compute the logits of a head, with an adapter's product or without."""
    logits = torch.nn.functional.linear(hidden_states, weight, bias)
    return logits if low_rank is None else logits + torch.nn.functional.linear(*low_rank)


def scaled_and_capped(logits: Tensor, logit_scale: float, softcap: float | None) -> Tensor:
    """Return what the softmax is taken of."""
    z = logit_scale * logits
    return z if softcap is None else softcap * torch.tanh(z / softcap)
