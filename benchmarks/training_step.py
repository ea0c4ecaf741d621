"""Forward and backward of whole models: time and memory of our loss beside peers.

    python benchmarks/training_step.py                       all models
    python benchmarks/training_step.py --model Gemma --model Llama --compile

The contenders of a model share one set of weights and one batch, so all of them are interleaved in
this one process, whatever the model's size; models run one after the other. One step of each is
compared with eager's first: a contender whose loss or gradient differs is not timed. Gradients are
made anew in every step and count as its memory, weights do not. No optimizer, no checkpointing.
Beside them the bare products, eager's matrix products and attentions alone, but for 4-bit models.
Writes JSON after every model, then a picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
from drawing import draw_where_possible
from model_contenders import some_contenders
from model_steps import run_model
from models import MODELS
from provenance import command_line, provenance
from report import terminal_steps_table

PACKAGES = ("transformers", "peft", "bitsandbytes", "liger-kernel")


def main() -> None:
    arguments = _parser().parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks need a CUDA GPU")
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "training_step.json"
    report = {**provenance(command_line(__file__, arguments), PACKAGES), "steps": []}
    chosen = partial(some_contenders, arguments.contender)
    for model in MODELS:
        if arguments.model is None or any(part in model.name for part in arguments.model):
            rows = run_model(model, rounds=arguments.rounds, compiled=arguments.compile, of=chosen)
            print(terminal_steps_table(rows), flush=True)
            report["steps"] += rows
            path.write_text(json.dumps(report, indent=1) + "\n")
    draw_where_possible(report, path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", action="append", help="only the models whose name contains this, or another"
    )
    parser.add_argument(
        "--contender",
        action="append",
        help="only eager and the contender of this name, or another",
    )
    parser.add_argument(
        "--rounds", type=int, default=8, help="timed steps of each contender (default 8)"
    )
    parser.add_argument(
        "--compile", action="store_true", help="eager and our layers compiled too: minutes"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/benchmarks"), help="folder of JSON and picture"
    )
    return parser


if __name__ == "__main__":
    main()
