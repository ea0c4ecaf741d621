"""Steps of TRL's SFTTrainer, loss and metrics included: with its own head, and with the flag.

    python benchmarks/sft_step.py

Measured and checked as ``training_step.py`` does it: forward and backward, no optimizer. Writes
JSON after every model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from model_steps import run_model
from models import MODELS
from provenance import command_line, provenance
from report import terminal_steps_table
from trl_contenders import contenders

PACKAGES = ("transformers", "trl")
NAMES = ("Llama-3.2-1B, 8 x 2048", "Gemma-3-270M, 8 x 2048")


def main() -> None:
    arguments = _parser().parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks need a CUDA GPU")
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "sft_step.json"
    report = {**provenance(command_line(__file__, arguments), PACKAGES), "sft_steps": []}
    for model in MODELS:
        if model.name in NAMES:
            rows = run_model(model, rounds=arguments.rounds, of=contenders)
            print(terminal_steps_table(rows), flush=True)
            report["sft_steps"] += rows
            path.write_text(json.dumps(report, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=8, help="timed steps of each contender (default 8)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/benchmarks"), help="folder of the JSON"
    )
    return parser


if __name__ == "__main__":
    main()
