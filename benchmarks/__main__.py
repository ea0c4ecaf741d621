"""Run a benchmark on a CUDA GPU, or show the reports of earlier runs.

python -m benchmarks training_step --model Gemma
python -m benchmarks show outputs/benchmarks/training_step.json
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from .benchmark import Benchmark, command_line, in_json, provenance
from .markdown import measured, plain_table
from .report import read, tables

BENCHMARKS = {  # the module's name, and what it measures
    "linear_cross_entropy": "the loss of a head, forward and backward, beside peers",
    "kinds_of_heads": "the loss of heads with LoRA",
    "log_probs": "log-probabilities, entropy and accuracy of labels, beside TRL's",
    "distillation": "distillation of a head from a larger one, beside peers",
    "layer_kernels": "norms, rotary embeddings and gated activations, beside a copy",
    "training_step": "forward and backward of whole models, beside peers",
    "sft_step": "steps of TRL's SFTTrainer, with its own head and with ours",
    "rl_step": "updates of TRL's DPOTrainer and GRPOTrainer, with its own head and with ours",
    "lora_step": "LoRA and QLoRA steps of whole models, one process a contender",
    "moe_step": "LoRA steps of mixtures of experts, one process a contender",
    "frozen_base_check": "errors of LoRA on frozen bases in 16, 8 and 4 bits, beside float64",
    "longest_row": "the longest LoRA and QLoRA rows that fit, one process a contender",
    "long_row_check": "gradients of a row of a million tokens, beside those of its blocks",
    "distributed_step": "steps of whole models on several GPUs, and a distributed head",
    "soak": "memory and losses of small models in thousands of steps, with and without the patch",
    "convergence": "losses of small models, trained with and without the patch",
    "distributed_convergence": "losses under FSDP2 and ZeRO-3 beside those of one GPU",
}
SHOW = "print the tables of reports, and draw their pictures"


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _chosen(arguments)
    if chosen.name == "show":
        return show(chosen.options)
    module = import_module(f".{chosen.name}", __package__)
    options = _options(chosen.name, module.__doc__, module.BENCHMARK, chosen.options)
    if not torch.cuda.is_available() and vars(options).get("device") != "cpu":
        sys.exit("benchmarks need a CUDA GPU")
    return run(chosen.name, module.BENCHMARK, options)


def run(name: str, benchmark: Benchmark, options: argparse.Namespace) -> int:
    """Measure every case, write the report after each row of it, and draw it at the end."""
    lists = benchmark.cases(options)
    if not any(lists.values()):
        sys.exit("no case has such a name")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{name}.json"
    report = provenance(command_line(name, options), benchmark.packages)
    report |= benchmark.header(options) | {key: [] for key in lists}
    for key, cases in lists.items():
        for measure_case in cases:
            rows = []
            for row in measure_case():
                rows.append(row)
                report[key].append(row)
                written = path.with_suffix(".new")  # what is there stays whole if this one ends
                written.write_text(in_json(report), encoding="utf-8")
                written.replace(path)
            print(plain_table(rows), flush=True)
    print(f"wrote {path}")
    _draw(read(path), path)
    return benchmark.finish(report)


def show(arguments: Sequence[str]) -> int:
    """Print the tables of reports, and draw their pictures beside them."""
    parser = argparse.ArgumentParser("python -m benchmarks show", description=SHOW)
    parser.add_argument("reports", nargs="+", type=Path, help="JSON of benchmarks")
    for path in parser.parse_args(arguments).reports:
        report = read(path)
        for part in (measured(report), *tables(report)):
            print(f"{part}\n")
        _draw(report, path)
    return 0


def _draw(report: dict, path: Path) -> None:
    if find_spec("matplotlib") is None:
        print(f"no matplotlib here, elsewhere: python -m benchmarks show {path}")
        return
    from .picture import draw_all

    for drawn in draw_all(report, path):
        print(f"wrote {drawn}")


def _chosen(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = BENCHMARKS | {"show": SHOW}
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description="names:\n" + "\n".join(f"  {name:24s}{what}" for name, what in names.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=names, metavar="NAME", help="one of these names")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="NAME --help lists them")
    return parser.parse_args(arguments)


def _options(
    name: str, description: str | None, benchmark: Benchmark, arguments: Sequence[str]
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmark.add_options(parser)
    if benchmark.rounds is not None:
        parser.add_argument(
            "--rounds",
            type=int,
            default=benchmark.rounds,
            help="timed calls of each contender (default %(default)s)",
        )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/benchmarks"),
        help="folder of the JSON and the pictures (default %(default)s)",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # as Ctrl-C: cleans up
    sys.exit(main())
