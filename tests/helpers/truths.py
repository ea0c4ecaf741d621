"""What tests take as the truth beside ``kernels.reference``: log-probabilities, attention and the
delta rule in plain PyTorch, for any floating dtype, differentiated by autograd.
"""

from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.linear_log_probs import LogProbs
from liger_patch.kernels.reference import head_logits, scaled_and_capped, segment_mask
from liger_patch.kernels.segments import Segments


def log_probs(
    logits: Tensor,  # (N, V)
    labels: Tensor,  # (N,)
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
) -> LogProbs:
    """Compute all that ``LogProbs`` names, of ready-made logits and in their dtype."""
    supervised = labels != ignore_index
    labels = labels[supervised]
    z = scaled_and_capped(logits[supervised], logit_scale, softcap) / temperature
    lse = torch.logsumexp(z, dim=-1)
    log_p = z - lse[:, None]
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)  # 0 * -inf is nan

    def of_all(values: Tensor) -> Tensor:
        return values.new_zeros(len(supervised)).masked_scatter(supervised, values)

    return LogProbs(
        log_probs=of_all(log_p.gather(-1, labels[:, None])[:, 0]),
        entropy=of_all(-(log_p.exp() * finite).sum(-1)),
        is_top1=of_all(z.argmax(-1) == labels),
        lse=of_all(lse),
        mean_logits=of_all(z.detach().mean(-1)),
        log_sum_sq_probs=of_all(torch.logsumexp(2 * log_p.detach(), dim=-1)),
    )


def linear_log_probs(
    hidden_states: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    labels: Tensor,  # (N,)
    *,
    bias: Tensor | None = None,  # (V,)
    low_rank: tuple[Tensor, Tensor] | None = None,  # (N, R), (V, R)
    **options: Any,  # as of ``log_probs``
) -> LogProbs:
    """Compute ``log_probs(linear(hidden_states, weight, bias) + linear(*low_rank), labels)``."""
    return log_probs(head_logits(hidden_states, weight, bias, low_rank), labels, **options)


def segment_attention(
    query: Tensor,  # (B, num_heads, T, D)
    key: Tensor,  # (B, num_key_value_heads, T, D)
    value: Tensor,
    segments: Segments,
    scale: float | None = None,
    sinks: Tensor | None = None,  # (num_heads,)
) -> Tensor:
    """Return the attention (B, T, num_heads, D) of each query to the keys of its segment. Sinks are
    the scores of one more key, whose value is 0.
    """
    mask = segment_mask(segments, len(query), query.shape[2], query.device)
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~mask[:, None], float("-inf"))
    if sinks is not None:
        sink = sinks[:, None, None].to(scores.dtype).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    shares = scores.softmax(-1)[..., : key.shape[2]]
    return (shares @ value).transpose(1, 2)


def gated_delta_rule(
    q: Tensor,  # (B, T, H / groups, K)
    k: Tensor,  # (B, T, H / groups, K)
    v: Tensor,  # (B, T, H, V)
    g: Tensor,  # (B, T, H)
    beta: Tensor,  # (B, T, H)
    sequence_ids: Tensor | None = None,  # (B, T)
) -> Tensor:
    """Compute the recurrence token by token, in the dtype of v: (B, T, H, V)."""
    q, k = (each.repeat_interleave(v.shape[2] // each.shape[2], 2) for each in (q, k))
    state = v.new_zeros(len(v), v.shape[2], q.shape[-1], v.shape[-1])
    # the first is of no tokens
    outputs = [v[:, :0] * (q * k)[:, :0, :, :1] * (g * beta)[:, :0, :, None]]
    for t in range(v.shape[1]):
        decay = g[:, t, :, None, None].exp()
        if sequence_ids is not None and t:
            is_same = sequence_ids[:, t] == sequence_ids[:, t - 1]
            decay = decay * is_same[:, None, None, None]
        state, key = state * decay, k[:, t, :, :, None]
        new = beta[:, t, :, None] * (v[:, t] - (key * state).sum(-2))
        state = state + key * new[:, :, None]
        output = (q[:, t, :, :, None] * state).sum(-2) * q.shape[-1] ** -0.5
        outputs.append(output[:, None])
    return torch.cat(outputs, 1)
