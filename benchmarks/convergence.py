"""Training with and without the patch: does it converge as well?

    python benchmarks/convergence.py                       llama, qwen3 and gemma2
    python benchmarks/convergence.py --model-type gemma3_text

Small models from random weights, trained in bf16 autocast on the source of Python's standard
library. The contenders of a model: Transformers as it is with four seeds, and once more with the
first seed's weights moved within rounding; then, with the first seed, apply_patch alone and with
layers. Every held-out loss is that of the trained weights in an unpatched model, in float32. Writes
JSON after every model, then a picture; exits with 1 where a patched run's last held-out loss is
farther from eager's than eager's seeds are from each other.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from convergence_report import judgement, terminal_convergence_table
from convergence_runs import Settings, run_model_type
from convergence_verdict import verdicts
from drawing import draw_where_possible
from from_examples import build_corpus, text_model_types
from provenance import command_line, provenance

PACKAGES = ("transformers", "tokenizers")
MODEL_TYPES = ("llama", "qwen3", "gemma2")  # plain; norms of heads; caps, 1 + weight, GELU


def main() -> int:
    arguments = _parser().parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks need a CUDA GPU")
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "convergence.json"
    settings = Settings(steps=arguments.steps)
    corpus = build_corpus(
        settings.vocab_size, settings.length, evaluation_tokens=settings.evaluation_tokens
    )
    report = {
        **provenance(command_line(__file__, arguments), PACKAGES),
        "settings": {**asdict(settings), "evaluated_after": settings.evaluated_after()},
        "text": {
            "files": corpus.files,
            "megabytes": round(corpus.megabytes, 1),
            "training_tokens": corpus.train.numel(),
            "held_out_tokens": corpus.evaluation.numel(),
        },
        "convergence": [],
    }
    for model_type in [arguments.model_type] if arguments.model_type else MODEL_TYPES:
        rows = run_model_type(model_type, settings, corpus, device="cuda")
        print(terminal_convergence_table(rows), flush=True)
        report["convergence"] += rows
        path.write_text(in_json(report))
    print(judgement(report["convergence"]))
    draw_where_possible(report, path)
    return 0 if all(verdict.holds for verdict in verdicts(report["convergence"])) else 1


def in_json(report: dict) -> str:
    """With each list of numbers on one line."""
    text = json.dumps(report, indent=1)
    return re.sub(r"\[[^][{}\"]+\]", lambda numbers: " ".join(numbers[0].split()), text) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model-type",
        choices=text_model_types(),
        metavar="TYPE",
        help=f"only this text model of liger_patch.registry (default {', '.join(MODEL_TYPES)})",
    )
    parser.add_argument(
        "--steps", type=int, default=Settings.steps, help="optimizer steps (default %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/benchmarks"), help="folder of JSON and picture"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
