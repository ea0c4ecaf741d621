"""Metrics of an evaluation by Transformers' Trainer, without logits: it takes both functions, and
gives ``eval_accuracy``, ``eval_perplexity`` and ``eval_entropy`` of the supervised tokens.

Trainer would keep the logits of the whole evaluation for them; here it keeps three numbers of each
token, which ``linear_log_probs`` computes from the hidden states. B: sequences, T: tokens of each,
V: vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from liger_patch.deferred.fuse import fused_log_probs, read_record
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.patch.packing import IGNORE_INDEX, next_labels

STATISTICS = ("log_probs", "is_top1", "entropy")


def preprocess_logits_for_metrics(logits: Any, labels: Tensor) -> Tensor:
    """Return what ``compute_metrics`` needs of each token (B, T, 3), in float32: log-probability of
    the next token, whether it is the most likely one, entropy.

    Args:
        logits: (B, T, V) of any model: those of a patched model are not computed. Or a tuple of
            what the model returns, with the logits in it.
        labels: (B, T), IGNORE_INDEX where not supervised. The token before a label predicts it. Or
            a tuple that begins with the labels.

    Raises:
        ValueError: no tensors, or shapes that do not fit.
    """
    if isinstance(logits, (tuple, list)):
        tensors = [each for each in logits if isinstance(each, Tensor)]
        logits = next((each for each in tensors if each.dim() == 3), (*tensors, logits)[0])
    if isinstance(labels, (tuple, list)) and labels:
        labels = labels[0]
    for name, value in (("logits", logits), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor or a tuple with it, got {value!r}")
    if logits.dim() != 3 or logits.shape[:2] != labels.shape:
        raise ValueError(
            f"logits must have shape (B, T, V) beside labels (B, T), got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}"
        )
    shifted = next_labels(labels, IGNORE_INDEX)
    product = read_record(logits) if isinstance(logits, DeferredLogits) else None
    if product is None:
        rows = zip(logits, shifted, strict=True)
        return torch.stack([_of_logits(*row) for row in rows])
    chunk_mib = logits.head_call.owner.chunk_mib
    with torch.no_grad():
        found = fused_log_probs(
            product, shifted.flatten(), outputs=STATISTICS[1:], chunk_mib=chunk_mib
        )
    values = [getattr(found, name).float().view_as(shifted) for name in STATISTICS]
    return torch.stack(values, -1)


def _of_logits(
    logits: Tensor,  # (T, V)
    labels: Tensor,  # (T,)
) -> Tensor:
    log_p = logits.float().log_softmax(-1)
    chosen = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    is_top1 = (log_p.argmax(-1) == labels).float()
    return torch.stack([chosen, is_top1, torch.special.entr(log_p.exp()).sum(-1)], -1)


def compute_metrics(prediction: Any) -> dict[str, float]:
    """Return accuracy, perplexity and entropy (nats), each over all supervised tokens.

    Args:
        prediction: ``transformers.EvalPrediction`` of ``preprocess_logits_for_metrics`` and labels.

    Raises:
        ValueError: predictions that are not (B, T, 3), or labels that are not (B, T).
    """
    if isinstance(prediction.predictions, list):
        raise ValueError(
            "predictions must be one array (B, T, 3), got a list of batches: leave "
            "eval_do_concat_batches=True"
        )
    values, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    if values.ndim != 3 or values.shape[-1] != len(STATISTICS):
        raise ValueError(
            "predictions must be (B, T, 3): give Trainer preprocess_logits_for_metrics too, got "
            f"{values.shape}"
        )
    if labels.shape != values.shape[:2]:
        raise ValueError(
            f"label_ids must be (B, T) beside predictions {values.shape}, got {labels.shape}"
        )
    supervised = labels[:, 1:] != IGNORE_INDEX  # Trainer pads predictions with it too
    log_probs, is_top1, entropy = (values[:, :-1][supervised].T).astype(np.float64)
    if not len(log_probs):
        return {}
    return {
        "accuracy": float(is_top1.mean()),
        "perplexity": float(np.exp(-log_probs.mean())),
        "entropy": float(entropy.mean()),
    }
