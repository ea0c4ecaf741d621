"""Measure the loss of real heads, forward and backward, beside peers and a lower bound.

    python -m benchmarks linear_cross_entropy                     everything
    python -m benchmarks linear_cross_entropy --part cases --case Gemma-2-2B --contender liger_patch

Three parts: cases, with every contender; a sweep over the number of tokens, with few; and calls of
an idle GPU, which waits for the host, with every contender. In the others, the GPU is busy before
each call. All run in this one process, contenders interleaved. Before anything is timed, each
contender's gradients are compared with float64 on a part of the tokens: one that is wrong is not
timed, and one that fails or runs out of memory is reported. Beyond 16384 tokens, there are fewer
rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from .benchmark import Benchmark, Cases, Rows
from .head_contenders import Loss, contenders, left_out, step, sweep_contenders
from .heads import HEADS, IDLE, SWEEP, Head, batch
from .lower_bounds import head_matmuls
from .measure import (
    Errors,
    Failure,
    Measurement,
    attempt,
    checked_rows,
    is_right,
    measure,
    relative_error,
    release_memory,
)
from .names import EAGER, LOWER_BOUND, OURS

# Not a power of two: there, eager's factor 1/N is exact, and its gradients better than elsewhere.
# A multiple of 8, because QuACK asks for one.
TOKENS = 2040
POWER_OF_TWO = 2048
LOAD_TOKENS = 16384  # the load before each turn; a case of more takes seconds, so has fewer rounds
FEWEST_ROUNDS = 5


def gradient_errors(
    head: Head,
    losses: Mapping[str, Loss],
    *,
    tokens: int = TOKENS,
    device: torch.device | str = "cuda",
) -> dict[str, Errors]:
    """Return the relative errors, by norm, of each contender's gradients on a few tokens. The truth
    is eager's in float64.
    """
    inputs = batch(replace(head, tokens=tokens), device=device, seed=1)
    _, *truth = step(losses[EAGER], *(_widened(tensor) for tensor in inputs))

    def errors(loss: Loss) -> list[float]:
        _, *gradients = step(loss, *inputs)
        return [relative_error(*pair) for pair in zip(gradients, truth, strict=True)]

    return {name: attempt(lambda loss=loss: errors(loss)) for name, loss in losses.items()}


def _widened(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def cases(options: argparse.Namespace) -> Cases:
    """Return the heads of each part whose name starts with --case. Say which peers are left out."""
    for name, why in left_out().items():
        print(f"{name} is left out: {why}")

    def chosen_of(losses: Mapping[str, Loss]) -> dict[str, Loss]:
        starts = tuple(options.contender or losses)
        found = {n: loss for n, loss in losses.items() if n == "eager" or n.startswith(starts)}
        if len(found) == 1:
            asked, known = " or ".join(starts), ", ".join(losses)
            sys.exit(f"no contender's name starts with {asked}: they are {known}")
        return found

    def case(head: Head) -> Rows:
        losses = chosen_of(contenders(head, compiled=not options.no_compile))
        return run_case(head, losses, rounds=options.rounds)

    def idle(head: Head) -> Rows:
        losses = chosen_of(contenders(head, compiled=not options.no_compile))
        return run_case(head, losses, rounds=options.rounds, is_loaded=False)

    def point(head: Head) -> Rows:
        return run_case(head, chosen_of(sweep_contenders(head)), rounds=options.rounds)

    found: Cases = {}
    for key, part, heads, measured in (
        ("results", "cases", HEADS, case),
        ("sweep", "sweep", SWEEP, point),
        ("idle", "idle", IDLE, idle),
    ):
        chosen = [head for head in heads if head.name.startswith(options.case or "")]
        found[key] = [partial(measured, head) for head in chosen if options.part in (None, part)]
    return found


def run_case(
    head: Head,
    losses: Mapping[str, Loss],
    *,
    rounds: int,
    device: torch.device | str = "cuda",
    is_loaded: bool = True,
) -> list[dict]:
    """Check, then time every contender on one case; the lower bound is the first row.

    Args:
        is_loaded: whether the device is busy before each call; otherwise it is idle.
    """
    rows = attempt(lambda: _rows(head, losses, rounds, device, is_loaded))
    release_memory()
    if isinstance(rows, Failure):  # of the inputs, the true gradients or the lower bound
        return [{**_key(head), "contender": LOWER_BOUND, **asdict(rows)}]
    return rows


def _rows(
    head: Head,
    losses: Mapping[str, Loss],
    rounds: int,
    device: torch.device | str,
    is_loaded: bool,
) -> list[dict]:
    checks = gradient_errors(head, losses, device=device)
    plain_and_ours = {n: f for n, f in losses.items() if n == "eager" or n.startswith(OURS)}
    others = gradient_errors(head, plain_and_ours, tokens=POWER_OF_TWO, device=device)
    measured = _measured(
        head,
        {name: loss for name, loss in losses.items() if is_right(checks[name], checks["eager"])},
        rounds,
        device,
        is_loaded,
    )
    rows = checked_rows(_key(head), checks, measured)
    for row in rows:
        if isinstance(errors := others.get(row["contender"]), list):
            row["gradient_errors_power_of_two"] = errors
    return rows


def _measured(
    head: Head,
    losses: Mapping[str, Loss],
    rounds: int,
    device: torch.device | str,
    is_loaded: bool,
) -> dict[str, Measurement | Failure]:
    inputs = hidden_states, weight, labels = batch(head, device=device)
    bound = load = head_matmuls(head, *inputs)
    if head.tokens > LOAD_TOKENS:
        load = head_matmuls(head, hidden_states[:LOAD_TOKENS], weight, labels[:LOAD_TOKENS])
        rounds = min(rounds, max(FEWEST_ROUNDS, rounds * LOAD_TOKENS // head.tokens))
    steps = {name: partial(step, loss, *inputs) for name, loss in losses.items()}
    before = load if is_loaded else None
    return measure({LOWER_BOUND: bound, **steps}, before=before, rounds=rounds, device=device)


def _key(head: Head) -> dict:
    return {"case": head.name, "tokens": head.tokens}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=("cases", "sweep", "idle"), help="only this part")
    parser.add_argument("--case", help="only the cases whose name starts with this")
    parser.add_argument(
        "--contender",
        action="append",
        help="only eager and the contenders whose name starts with this, or another",
    )
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")


BENCHMARK = Benchmark(
    packages=(
        "liger-kernel",
        "cut-cross-entropy",
        "trl",
        "quack-kernels",
        "unsloth",
        "unsloth_zoo",
    ),
    cases=cases,
    rounds=10,  # fewer beyond LOAD_TOKENS
    add_options=_add_options,
)
