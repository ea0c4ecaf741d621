"""The operators on what deferred logits are made of. N: rows, flattened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from liger_patch.deferred.parts import Parts
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.linear_log_probs import LogProbs, linear_log_probs


def fused_loss(parts: Parts, labels: Tensor, **options: Any) -> Tensor:
    """Loss of N rows of deferred logits and labels (N,); options of ``linear_cross_entropy``."""
    with _arguments(parts) as arguments:
        return linear_cross_entropy(**arguments, labels=labels, **options)


def fused_log_probs(parts: Parts, labels: Tensor, **options: Any) -> LogProbs:
    """Log-probabilities of labels (N,) and what ``linear_log_probs`` knows beside them."""
    with _arguments(parts) as arguments:
        return linear_log_probs(**arguments, labels=labels, **options)


@contextmanager
def _arguments(parts: Parts) -> Iterator[dict[str, Any]]:
    """The head as the operators take it, in the autocast state of its call."""
    dtype = parts.autocast_dtype
    low_rank = None
    if parts.low_rank is not None:
        states, low_rank_weight = parts.low_rank
        low_rank = states.reshape(-1, states.shape[-1]), low_rank_weight
    with torch.autocast(parts.weight.device.type, dtype=dtype, enabled=dtype is not None):
        yield {
            "hidden_states": parts.hidden_states.reshape(-1, parts.hidden_states.shape[-1]),
            "weight": parts.weight,
            "bias": parts.bias,
            "low_rank": low_rank,
            "softcap": parts.softcap,
            "logit_scale": parts.logit_scale,
        }
