"""Kernels of layers, forward and backward apart: how near each comes to the bandwidth of a copy.

    python benchmarks/layer_kernels.py
    python benchmarks/layer_kernels.py --case rotary

These kernels wait for memory, so the yardstick is a copy, from one place of the device to another,
that moves as many bytes as the kernel has to: what it reads and what it writes, each once. The
share is the time of that copy over the kernel's, of the same run and in turns. Before anything is
timed, results and gradients are compared with eager's in float64, on the inputs that are timed: a
contender that is wrong is not timed. ``batches_of_calls.py`` says how the others are. Writes JSON
after every case.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch
from attempts import Failure, attempt, release_memory
from batches_of_calls import (
    Function,
    Slots,
    backward_batch,
    calls_of,
    copies,
    forward_batch,
    gradients_of,
    measure_batches,
    results_of,
)
from gradient_check import Errors, is_right
from layer_cases import CASES, Case
from measure import Measurement
from provenance import command_line, provenance
from report import COPY, terminal_layer_kernels_table
from torch import Tensor

PACKAGES = ("liger-kernel",)


def main() -> None:
    arguments = _parser().parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks need a CUDA GPU")
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "layer_kernels.json"
    report = {**provenance(command_line(__file__, arguments), PACKAGES), "layer_kernels": []}
    for case in CASES:
        if arguments.case is None or arguments.case in case.name:
            rows = run_case(case, contenders(case), rounds=arguments.rounds)
            print(terminal_layer_kernels_table(rows), flush=True)
            report["layer_kernels"] += rows
            path.write_text(json.dumps(report, indent=1) + "\n")


def contenders(case: Case) -> dict[str, Function]:
    """Name to function, eager first."""
    theirs: dict[str, Function] = {}
    if find_spec("liger_kernel"):
        theirs["Liger-Kernel"] = case.liger
    return {"eager": case.eager, **theirs, "liger_patch": case.ours}


def run_case(
    case: Case,
    functions: Mapping[str, Function],
    *,
    rounds: int,
    device: torch.device | str = "cuda",
) -> list[dict]:
    """Check, then time every contender, in both directions; the copy is the first row of each."""
    rows = attempt(lambda: _rows(case, functions, rounds, device))
    release_memory()
    if isinstance(rows, Failure):  # of the inputs, of the true gradients or of the copy
        return [
            {"case": case.name, "direction": direction, "contender": COPY, **asdict(rows)}
            for direction in ("forward", "backward")
        ]
    return rows


def _rows(
    case: Case, functions: Mapping[str, Function], rounds: int, device: torch.device | str
) -> list[dict]:
    slots = Slots(case.inputs(device), calls_of(case.forward_bytes()))
    errors = _errors(case, functions, slots)
    right = {n: f for n, f in functions.items() if is_right(errors[n], errors["eager"])}
    results = len(slots.inputs[0].upstream)  # in front of the gradients
    rows = []
    for direction, size, batch_of, part in (
        ("forward", case.forward_bytes(), forward_batch, slice(results)),
        ("backward", case.backward_bytes(), backward_batch, slice(results, None)),
    ):
        batches = {COPY: copies(size, len(slots.inputs), device)}
        batches |= {name: batch_of(function, slots) for name, function in right.items()}
        measured = measure_batches(batches, slots, rounds=rounds, device=device)
        copy = measured[COPY]
        if isinstance(copy, Failure):
            raise RuntimeError(copy.failure)
        for name in (COPY, *functions):
            row = {"case": case.name, "direction": direction, "contender": name, "bytes": size}
            checked = errors.get(name)
            if isinstance(checked, list):
                row["errors"] = checked[part]
            outcome = measured.get(name, checked)
            if isinstance(outcome, Measurement):
                row |= {k: v for k, v in asdict(outcome).items() if k != "peak_mib"}  # of a batch
                row |= {"tb_per_s": size / outcome.ms / 1e9, "share": copy.ms / outcome.ms}
            elif isinstance(outcome, Failure):
                row |= asdict(outcome)
            else:
                row["wrong"] = True
            rows.append(row)
    return rows


def _errors(case: Case, functions: Mapping[str, Function], slots: Slots) -> dict[str, Errors]:
    """Relative errors, by norm, of each contender's results and then gradients."""
    inputs = slots.inputs[0]
    wide = inputs.map(lambda each: each.detach().double()).trainable()
    exact_results = results_of(case.eager, wide)
    exact_gradients = gradients_of(exact_results, wide)

    def errors(function: Function) -> list[float]:
        slots.restore()
        results = results_of(function, inputs)
        found = [_error(*pair) for pair in zip(results, exact_results, strict=True)]
        gradients = gradients_of(results, inputs)
        return found + [_error(*pair) for pair in zip(gradients, exact_gradients, strict=True)]

    return {name: attempt(lambda f=function: errors(f)) for name, function in functions.items()}


@torch.no_grad()
def _error(value: Tensor, truth: Tensor) -> float:
    if value.shape != truth.shape:
        raise RuntimeError(f"the shape is {tuple(value.shape)} instead of {tuple(truth.shape)}")
    return ((value.double() - truth).norm() / truth.norm()).item()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", help="only the cases whose name contains this")
    parser.add_argument(
        "--rounds", type=int, default=8, help="timed batches of each contender (default 8)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/benchmarks"), help="folder of the JSON"
    )
    return parser


if __name__ == "__main__":
    main()
