"""Measure how near the kernels of layers come to the bandwidth of a copy, forward and backward.

    python -m benchmarks layer_kernels
    python -m benchmarks layer_kernels --case rotary

These kernels are bound by memory. So each is compared with a copy on the device that moves as many
bytes as the kernel has to read and to write, each once. The share is the time of that copy over the
kernel's, in the same run and in turns. Before anything is timed, results and gradients are compared
with eager's in float64, on the inputs that are timed: a contender that is wrong is not timed.
``batches_of_calls.py`` times the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec

import torch

from .batches_of_calls import (
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
from .benchmark import Benchmark
from .layer_cases import CASES, Case
from .measure import Errors, Failure, Measurement, attempt, is_right, relative_error, release_memory
from .names import COPY


def contenders(case: Case) -> dict[str, Function]:
    """Return functions by name, eager first."""
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
    """Return the relative errors, by norm, of each contender's results and then gradients."""
    inputs = slots.inputs[0]
    wide = inputs.map(lambda each: each.detach().double()).trainable()
    exact_results = results_of(case.eager, wide)
    exact_gradients = gradients_of(exact_results, wide)

    def errors(function: Function) -> list[float]:
        slots.restore()
        results = results_of(function, inputs)
        found = [relative_error(*pair) for pair in zip(results, exact_results, strict=True)]
        gradients = gradients_of(results, inputs)
        return found + [
            relative_error(*pair) for pair in zip(gradients, exact_gradients, strict=True)
        ]

    return {name: attempt(lambda f=function: errors(f)) for name, function in functions.items()}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", help="only the cases whose name contains this")


BENCHMARK = Benchmark(
    packages=("liger-kernel",),
    cases=lambda options: {
        "layer_kernels": [
            partial(run_case, case, contenders(case), rounds=options.rounds)
            for case in CASES
            if (options.case or "") in case.name
        ]
    },
    rounds=8,
    add_options=_add_options,
)
