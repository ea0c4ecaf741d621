"""Measure log-probabilities of labels, entropy and accuracy for SFTTrainer, beside TRL's own.

    python -m benchmarks log_probs

The loss is minus the mean of the log-probabilities. Measured and checked as
``linear_cross_entropy.py`` does it.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from liger_patch import linear_log_probs

from .benchmark import Benchmark
from .head_contenders import Loss, eager, peers
from .heads import HEADS, IGNORE_INDEX, Head
from .linear_cross_entropy import run_case
from .terminal import terminal_table

CASES = (
    "Llama-3-8B",
    "Llama-3-8B, frozen",
    "Llama-3-8B, 70 % ignored",
    "Gemma-2-2B",
    "Gemma-3-270M",
)


def contenders(head: Head) -> dict[str, Loss]:
    """Return losses by name, eager's cross entropy first: it has neither entropy nor accuracy."""
    theirs = {name: loss for name, loss in peers(head).items() if name == "TRL"}
    return {"eager": eager(head), **theirs, "liger_patch": ours(head)}


def ours(head: Head) -> Loss:
    """Return the loss, with the outputs that SFTTrainer asks for beside the log-probabilities."""

    def loss(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        log_probs = linear_log_probs(
            hidden_states,
            weight,
            labels,
            ignore_index=IGNORE_INDEX,
            softcap=head.softcap,
            outputs=("entropy", "is_top1"),
        ).log_probs
        return -log_probs.sum() / (labels != IGNORE_INDEX).sum().clamp(min=1)

    return loss


BENCHMARK = Benchmark(
    packages=("trl",),
    cases=lambda options: {
        "log_probs": [
            partial(run_case, head, contenders(head), rounds=options.rounds)
            for head in HEADS
            if head.name in CASES
        ]
    },
    table=terminal_table,
    rounds=10,
)
