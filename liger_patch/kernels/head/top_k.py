"""Forward KL from a teacher of which the likeliest classes are known, in place on rows of logits.

    loss = sum_k p_k (t_k - s_k), with a tail + p_tail (log p_tail - log q_tail)

with s the log-probabilities of the student's logits over the temperature, q = exp(s), t those of
the teacher at K classes, p = exp(t), p_tail = 1 - sum_k p_k and q_tail likewise. By the logits over
the temperature, the gradient is q f - p at the K classes, and q r elsewhere: f = r = sum_k p_k,
with a tail f = 1 and r = 1 - p_tail / q_tail. C: rows, V: vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from liger_patch.kernels.head.divergences import LOWEST
from liger_patch.kernels.head.row_sums import (
    BASIC,
    RowGradients,
    RowSums,
    row_gradients_,
    row_sums,
    z_and_slope,
)
from liger_patch.kernels.options import LossOptions


def top_k_rows_(
    logits: Tensor,  # (C, V)
    log_probs: Tensor,  # (C, K)
    indices: Tensor,  # (C, K) distinct in each row
    options: LossOptions,
    temperature: float,
    tail: bool,
    row_scale: Tensor | None,  # (C,)
) -> Tensor:
    """Return the losses (C,) of raw logits. With ``row_scale``, overwrite the logits with the
    gradient of ``row_scale * losses``.
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
