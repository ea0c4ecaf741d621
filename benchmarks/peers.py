"""Other people's losses of a head, where their packages are installed.

Each imports its package in the call: a package that does not import here is then a contender that
does not run.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from attempts import Unsupported
from heads import IGNORE_INDEX, Head
from torch import Tensor

# hidden states (N, H), weight (V, H), labels (N,) -> ()
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

QUACK_CHUNK = 4096  # tokens: the default of chunked_linear_cross_entropy


def peers(head: Head) -> dict[str, Loss]:
    """Name to loss."""
    found: dict[str, Loss] = {}
    if find_spec("liger_kernel"):
        found["Liger-Kernel"] = _liger(head)
    if find_spec("cut_cross_entropy"):
        found["CCE"] = _cut_cross_entropy(head)
        found["CCE, unfiltered"] = _cut_cross_entropy(head, filter_eps=None)
    if find_spec("trl"):
        found["TRL"] = _trl(head)
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found["PyTorch"] = _pytorch(head)
    if find_spec("quack"):
        found["QuACK"] = _quack(head)
        found["QuACK, base"] = _quack(head, use_scaled_exp=False)
    return found


def _liger(head: Head) -> Loss:
    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        module = import_module("liger_kernel.transformers")
        liger = module.LigerFusedLinearCrossEntropyLoss(softcap=head.softcap)
        return liger(weight, hidden_states, labels)

    return loss


def _cut_cross_entropy(head: Head, **options: Any) -> Loss:
    """With its gradient filter, which is not exact, unless the options say otherwise."""

    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        cce = import_module("cut_cross_entropy").linear_cross_entropy
        return cce(hidden_states, weight, labels, softcap=head.softcap, **options)

    return loss


def _trl(head: Head) -> Loss:
    """The head that SFTTrainer gives a model, with what it asks for and the mean that it takes."""

    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        utils = import_module("trl.trainer.utils")
        supervised = labels != IGNORE_INDEX
        log_probs, *_ = utils._ChunkedLogProbFunction.apply(
            hidden_states[supervised],
            weight,
            None,  # bias
            labels[supervised],
            1.0,  # temperature
            utils._CHUNKED_LOGPROB_CHUNK_SIZE,
            head.softcap,
            1.0,  # logit_scale
            ("log_probs", "entropy", "is_top1"),
        )
        per_token = log_probs.new_zeros(labels.shape).masked_scatter(supervised, log_probs)
        return -per_token.sum() / supervised.sum().clamp(min=1)

    return loss


def _pytorch(head: Head) -> Loss:
    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        _refuse_softcap(head)
        fused: Any = vars(torch.nn.functional)["linear_cross_entropy"]
        options = vars(torch.nn)["LinearCrossEntropyOptions"]()
        return fused(hidden_states, weight, labels, ignore_index=IGNORE_INDEX, options=options)

    return loss


def _quack(head: Head, **options: Any) -> Loss:
    """Its choice of pipeline, or the one that its options name.

    In 0.6.5 the one that it prefers on Hopper raises where H equals the chunk.
    """

    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        _refuse_softcap(head)
        fused = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
        return fused(
            hidden_states,
            weight,
            labels,
            chunk_size=QUACK_CHUNK,
            ignore_index=IGNORE_INDEX,
            **options,
        )

    return loss


def _refuse_softcap(head: Head) -> None:
    if head.softcap is not None:
        raise Unsupported("no softcap")
