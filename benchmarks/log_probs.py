"""Log-probabilities of labels, entropy and accuracy as TRL's SFTTrainer takes them, and their
gradients: our operator beside TRL's own and bare products.

    python benchmarks/log_probs.py

The loss is minus the mean of the log-probabilities. Measured and checked as
``linear_cross_entropy.py`` does it. Writes JSON after every case.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from contenders import eager
from heads import HEADS, IGNORE_INDEX, Head
from linear_cross_entropy import run_case
from peers import Loss, peers
from provenance import command_line, provenance
from report import terminal_table
from torch import Tensor

from liger_patch import linear_log_probs

PACKAGES = ("trl",)
CASES = (
    "Llama-3-8B",
    "Llama-3-8B, frozen",
    "Llama-3-8B, 70 % ignored",
    "Gemma-2-2B",
    "Gemma-3-270M",
)


def main() -> None:
    arguments = _parser().parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks need a CUDA GPU")
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "log_probs.json"
    report = {**provenance(command_line(__file__, arguments), PACKAGES), "log_probs": []}
    for head in HEADS:
        if head.name in CASES:
            rows = run_case(head, contenders(head), rounds=arguments.rounds)
            print(terminal_table(rows), flush=True)
            report["log_probs"] += rows
            path.write_text(json.dumps(report, indent=1) + "\n")


def contenders(head: Head) -> dict[str, Loss]:
    """Name to loss, eager first: its cross entropy alone, which TRL takes the place of."""
    theirs = {name: loss for name, loss in peers(head).items() if name == "TRL"}
    return {"eager": eager(head), **theirs, "liger_patch": ours(head)}


def ours(head: Head) -> Loss:
    """With what SFTTrainer asks for beside the log-probabilities."""

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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=10, help="timed calls of each contender (default 10)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/benchmarks"), help="folder of the JSON"
    )
    return parser


if __name__ == "__main__":
    main()
