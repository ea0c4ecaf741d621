"""Measure log-probabilities of labels, entropy and accuracy for SFTTrainer, beside peers.

    python -m benchmarks log_probs
    python -m benchmarks log_probs --case Qwen3-8B

The loss is minus the mean of the log-probabilities; that of the cases "a factor a token" weighs
each, as advantages of GRPO and PPO do. TRL's head and ours compute entropy and accuracy beside
them, Liger-Kernel's cross entropy accuracy alone, its "scaled" one (for Hopper and PPO) and verl's
fused heads entropy alone. Measured and checked as ``linear_cross_entropy.py`` does it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from liger_patch import linear_log_probs

from .benchmark import Benchmark, Cases
from .head_contenders import Loss, refuse_softcap, trl_log_probs
from .heads import HEADS, IGNORE_INDEX, Head
from .linear_cross_entropy import run_case
from .names import EAGER, OURS

# head, hidden states (N, H), weight (V, H), labels (N,) -> (N,), 0 where ignored
LogProbs = Callable[[Head, Tensor, Tensor, Tensor], Tensor]

CASES = (
    "Llama-3-8B",
    "Llama-3-8B, frozen",
    "Llama-3-8B, 70 % ignored",
    "Gemma-2-2B",
    "Gemma-3-270M",
)
# the shape that https://github.com/huggingface/trl/issues/7244 measures
WEIGHTED = (Head("Qwen3-8B, a factor a token", 4096, 151936, 8192),)


def contenders(head: Head, *, weighted: bool = False) -> dict[str, Loss]:
    """Return losses by name, eager's cross entropy first: it has neither entropy nor accuracy.

    Args:
        weighted: whether each token has a factor of its own.
    """
    found: dict[str, tuple[str, LogProbs]] = {
        EAGER: ("torch", _eager),
        "TRL": ("trl", trl_log_probs),
        "Liger-Kernel": ("liger_kernel", _liger),
        "Liger-Kernel, scaled": ("liger_kernel", _liger_scaled),
        "verl": ("verl", _verl),
        "verl, Triton": ("verl", _verl_triton),
        OURS: ("liger_patch", partial(_ours, same_gradient=not weighted)),
    }
    if weighted:
        found[f"{OURS}, row_weights"] = "liger_patch", partial(_ours, weighs_rows=True)
    return {
        name: partial(_loss, partial(log_probs, head), weighted)
        for name, (module, log_probs) in found.items()
        if find_spec(module)
    }


def _loss(
    log_probs: Callable[[Tensor, Tensor, Tensor], Tensor],
    weighted: bool,
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
) -> Tensor:
    each = log_probs(hidden_states, weight, labels)
    if weighted:
        each = each * _weights(labels)
    return -each.sum() / (labels != IGNORE_INDEX).sum().clamp(min=1)


def _weights(labels: Tensor) -> Tensor:
    return torch.linspace(-1, 1, len(labels), device=labels.device)


def _eager(head: Head, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Compute what Transformers' models do: logits, then cross entropy in at least float32."""
    logits = torch.nn.functional.linear(hidden_states, weight)
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    how = {"ignore_index": IGNORE_INDEX, "reduction": "none"}
    return -torch.nn.functional.cross_entropy(logits, labels, **how)


def _ours(
    head: Head,
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    same_gradient: bool = False,
    weighs_rows: bool = False,
) -> Tensor:
    """Compute the outputs that SFTTrainer asks for too."""
    return linear_log_probs(
        hidden_states,
        weight,
        labels,
        ignore_index=IGNORE_INDEX,
        softcap=head.softcap,
        outputs=("entropy", "is_top1"),
        same_gradient=same_gradient,
        row_weights=_weights(labels) if weighs_rows else None,
    ).log_probs


def _liger(head: Head, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    module = import_module("liger_kernel.transformers")
    how = {"softcap": head.softcap, "reduction": "none", "return_token_accuracy": True}
    return -module.LigerFusedLinearCrossEntropyLoss(**how)(weight, hidden_states, labels).loss


def _liger_scaled(head: Head, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    refuse_softcap(head)
    scaled = import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction
    losses, _ = scaled.apply(hidden_states, weight, labels, return_entropy=True)
    return -losses


def _verl(head: Head, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    refuse_softcap(head)
    fused = import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO()
    return _of_supervised(fused, hidden_states, weight, labels)


def _verl_triton(head: Head, hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    refuse_softcap(head)
    fused = import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy
    return _of_supervised(fused, hidden_states, weight, labels)


def _of_supervised(
    fused: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor,
) -> Tensor:
    """Compute log-probabilities and entropies by a head that ignores no label."""
    supervised = labels != IGNORE_INDEX
    log_probs, _ = fused(hidden_states[supervised], weight, labels[supervised])
    return log_probs.new_zeros(labels.shape).masked_scatter(supervised, log_probs)


def _cases(options: argparse.Namespace) -> Cases:
    heads = [head for head in (*HEADS, *WEIGHTED) if head.name in CASES or head in WEIGHTED]
    return {
        "log_probs": [
            partial(
                run_case,
                head,
                contenders(head, weighted=head in WEIGHTED),
                rounds=options.rounds,
            )
            for head in heads
            if head.name.startswith(options.case or "")
        ]
    }


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", help="only the cases whose name starts with this")


BENCHMARK = Benchmark(
    packages=("trl", "liger-kernel", "verl"),
    cases=_cases,
    rounds=10,
    add_options=_add_options,
)
