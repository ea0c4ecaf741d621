"""Forward and backward of the loss of real heads: time and memory beside peers and bare products.

    python benchmarks/linear_cross_entropy.py                     everything
    python benchmarks/linear_cross_entropy.py --part cases --case Gemma-2-2B

Two parts: cases, with every contender, and a sweep over the number of tokens, with few. All of it
runs in this one process, contenders interleaved. Before anything is timed, each contender's
gradients are compared with float64 on a part of the tokens: one that is wrong is not timed, and one
that fails or runs out of memory is reported. Writes JSON after every case, then pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from attempts import Failure, attempt, release_memory
from contenders import OURS, bare_products, contenders, step, sweep_contenders
from drawing import draw_where_possible
from gradient_check import POWER_OF_TWO, gradient_errors, is_right
from heads import HEADS, SWEEP, Head, batch
from measure import Measurement, measure
from peers import Loss
from provenance import command_line, provenance
from report import FLOOR, terminal_table

PACKAGES = ("liger-kernel", "cut-cross-entropy", "trl", "quack-kernels")
PARTS = {"cases": "results", "sweep": "sweep"}  # to their keys in the report
LOAD_TOKENS = 16384  # the load before each turn; a case of more takes seconds, so has fewer rounds
FEWEST_ROUNDS = 5


def main() -> None:
    arguments = _parser().parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks need a CUDA GPU")
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "linear_cross_entropy.json"
    report = {**provenance(command_line(__file__, arguments), PACKAGES), "results": [], "sweep": []}
    for part in PARTS if arguments.part is None else [arguments.part]:
        for head in HEADS if part == "cases" else SWEEP:
            if arguments.case is not None and not head.name.startswith(arguments.case):
                continue
            if part == "cases":
                losses = contenders(head, compiled=not arguments.no_compile)
            else:
                losses = sweep_contenders(head)
            rows = run_case(head, losses, rounds=arguments.rounds)
            print(terminal_table(rows), flush=True)
            report[PARTS[part]] += rows
            path.write_text(json.dumps(report, indent=1) + "\n")
    draw_where_possible(report, path)


def run_case(
    head: Head, losses: Mapping[str, Loss], *, rounds: int, device: torch.device | str = "cuda"
) -> list[dict]:
    """Check, then time every contender on one case; the floor is the first row."""
    rows = attempt(lambda: _rows(head, losses, rounds, device))
    release_memory()
    if isinstance(rows, Failure):  # of the inputs, of the true gradients or of the floor
        return [{**_key(head, FLOOR), **asdict(rows)}]
    return rows


def _rows(
    head: Head, losses: Mapping[str, Loss], rounds: int, device: torch.device | str
) -> list[dict]:
    checks = gradient_errors(head, losses, device=device)
    plain_and_ours = {n: f for n, f in losses.items() if n == "eager" or n.startswith(OURS)}
    others = gradient_errors(head, plain_and_ours, tokens=POWER_OF_TWO, device=device)
    measured = _measured(
        head,
        {name: loss for name, loss in losses.items() if is_right(checks[name], checks["eager"])},
        rounds,
        device,
    )
    floor = measured[FLOOR]
    if isinstance(floor, Failure):
        raise RuntimeError(floor.failure)
    rows = []
    for name in (FLOOR, *losses):
        row = _key(head, name)
        for field, errors in (
            ("gradient_errors", checks.get(name)),
            ("gradient_errors_power_of_two", others.get(name)),
        ):
            if isinstance(errors, list):
                row[field] = errors
        outcome = measured.get(name, checks.get(name))
        if isinstance(outcome, Measurement):
            row |= {**asdict(outcome), "floor_over_time": floor.ms / outcome.ms}
        elif isinstance(outcome, Failure):
            row |= asdict(outcome)
        else:
            row["wrong"] = True
        rows.append(row)
    return rows


def _measured(
    head: Head, losses: Mapping[str, Loss], rounds: int, device: torch.device | str
) -> dict[str, Measurement | Failure]:
    inputs = hidden_states, weight, labels = batch(head, device=device)
    floor = load = bare_products(head, *inputs)
    if head.tokens > LOAD_TOKENS:
        load = bare_products(head, hidden_states[:LOAD_TOKENS], weight, labels[:LOAD_TOKENS])
        rounds = min(rounds, max(FEWEST_ROUNDS, rounds * LOAD_TOKENS // head.tokens))
    steps = {name: partial(step, loss, *inputs) for name, loss in losses.items()}
    return measure({FLOOR: floor, **steps}, before=load, rounds=rounds, device=device)


def _key(head: Head, contender: str) -> dict:
    return {"case": head.name, "tokens": head.tokens, "contender": contender}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, help="only this part")
    parser.add_argument("--case", help="only the cases whose name starts with this")
    parser.add_argument(
        "--rounds",
        type=int,
        default=10,
        help=f"timed calls of each contender, fewer beyond {LOAD_TOKENS} tokens (default 10)",
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("outputs/benchmarks"),
        help="folder of JSON and pictures",
    )
    return parser


if __name__ == "__main__":
    main()
