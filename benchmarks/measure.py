"""Measure times and memory of competing functions, interleaved in one process on one device.

A contender that fails or is wrong is reported, not timed, and stops nothing.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .names import LOWER_BOUND

MIB = 2**20
MAX_RELATIVE_ERROR = 0.02  # by norm: bf16 rounding leaves about 0.003
LOAD_MS = 40.0  # of matmuls: after 10 ms the clock is still higher than in a sustained run
MOST_LOADS = 1000
HOST_CALLS = 5  # for a median; no more than rounds
OUT_OF_MEMORY = "out of memory"  # the failure

Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """Why there is no result, in words."""

    failure: str


Errors = list[float] | Failure  # relative, one a gradient or result


class Unsupported(Exception):
    """Raised for what a contender cannot compute."""


def attempt(function: Callable[[], Result]) -> Result | Failure:
    """Return the function's result, or why there is none; a failure leaves no memory allocated."""
    try:
        return function()
    except Exception as error:
        failure = Failure(_in_words(error))
    release_memory()  # here, where the traceback and the tensors of its frames are gone
    return failure


def release_memory() -> None:
    """Give unused memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _in_words(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    message = str(error).strip().partition("\n")[0]
    if isinstance(error, Unsupported):
        return f"does not run: {message}"
    return f"does not run: {type(error).__name__}" + (f": {message}" if message else "")


@dataclass(frozen=True)
class Measurement:
    """Median time of one call, its spread, and its peak memory over what was allocated before it.

    Attributes:
        ms: median over the rounds, by CUDA events.
        ms_low, ms_high: first and last decile.
        peak_mib: MiB.
        host_ms: median time until the call returns, on an idle device.
    """

    ms: float
    ms_low: float
    ms_high: float
    peak_mib: float
    host_ms: float


@torch.no_grad()
def relative_error(value: Tensor, truth: Tensor) -> float:
    """Return the norm of the difference over that of the truth."""
    if value.shape != truth.shape:
        raise RuntimeError(f"the shape is {tuple(value.shape)} instead of {tuple(truth.shape)}")
    truth = truth.double()
    return ((value.double() - truth).norm() / truth.norm()).item()


def is_right(errors: Errors, eager_errors: Errors) -> bool:
    """Tell whether each error is small, or at most twice eager's, which grows with the logits."""
    if isinstance(errors, Failure):
        return False
    plain = eager_errors if isinstance(eager_errors, list) else [0.0] * len(errors)
    return all(
        error <= max(MAX_RELATIVE_ERROR, 2 * own) for error, own in zip(errors, plain, strict=True)
    )


def checked_rows(
    key: Mapping[str, object],
    checks: Mapping[str, Errors],
    measured: Mapping[str, Measurement | Failure],
) -> list[dict]:
    """Return a row for the lower bound and one for each contender: the errors of its gradients, and
    its times, why there are none, or that it is wrong.

    Args:
        key: what all rows begin with.
    """
    bound = measured[LOWER_BOUND]
    if isinstance(bound, Failure):
        raise RuntimeError(bound.failure)
    rows = []
    for name in (LOWER_BOUND, *checks):
        row: dict = {**key, "contender": name}
        errors = checks.get(name)
        if isinstance(errors, list):
            row["gradient_errors"] = errors
        outcome = measured.get(name, errors)
        if isinstance(outcome, Measurement):
            row |= {**asdict(outcome), "floor_over_time": bound.ms / outcome.ms}
        elif isinstance(outcome, Failure):
            row |= asdict(outcome)
        else:
            row["wrong"] = True
        rows.append(row)
    return rows


def measure(
    functions: Mapping[str, Callable[[], object]],
    *,
    before: Callable[[], object] | None = None,
    load_ms: float = LOAD_MS,
    rounds: int = 10,
    device: torch.device | str = "cuda",
) -> dict[str, Measurement | Failure]:
    """Measure the peak memory of every function, then time all of them in turn, ``rounds`` times.

    Each is called once before its memory is measured, and once more before the timed rounds: that
    fills the allocator's cache. A GPU at its power limit clocks higher after a light load. So each
    round has an order of its own, and ``before`` runs in front of each call, untimed, for about
    ``load_ms``: after shorter loads than LOAD_MS, the clock is higher than in any training step.
    What a call returns is freed before the next. A function that fails is not called again.
    """
    kind = torch.device(device).type
    results: dict[str, Measurement | Failure] = {}
    peaks: dict[str, float] = {}
    for name, function in functions.items():
        peak = attempt(lambda function=function: _peak_mib(function, kind))
        if isinstance(peak, Failure):
            results[name] = peak
        else:
            peaks[name] = peak
    loads = [] if before is None else [before] * _times_to_last(before, load_ms, kind)
    times: dict[str, list[float]] = {name: [] for name in peaks}
    order = list(peaks)
    shuffle = random.Random(0).shuffle
    for turn in range(rounds + 1):
        shuffle(order)
        for name in tuple(order):
            for load in loads:
                load()
            ms = attempt(lambda name=name: call_ms(functions[name], kind))
            if isinstance(ms, Failure):
                results[name] = ms
                order.remove(name)
            elif turn > 0:
                times[name].append(ms)
    for name in order:
        t = times[name]
        host_ms = attempt(lambda name=name: _host_ms(functions[name], kind, rounds))
        if isinstance(host_ms, Failure):
            results[name] = host_ms
            continue
        results[name] = Measurement(statistics.median(t), *_deciles(t), peaks[name], host_ms)
    return {name: results[name] for name in functions}


def _peak_mib(function: Callable[[], object], kind: str) -> float:
    function()
    if kind != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - allocated) / MIB


def call_ms(function: Callable[[], object], kind: str) -> float:
    """Return the time of one call, on a device of this type."""
    if kind != "cuda":
        start = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - start)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    function()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def _times_to_last(function: Callable[[], object], ms: float, kind: str) -> int:
    """Return how often the function must run to keep the device busy for so long."""
    if kind != "cuda":
        return 1
    call_ms(function, kind)
    return max(1, math.ceil(ms / max(call_ms(function, kind), ms / MOST_LOADS)))


def _host_ms(function: Callable[[], object], kind: str, rounds: int) -> float:
    times = []
    for _ in range(min(HOST_CALLS, rounds)):
        if kind == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def _deciles(values: list[float]) -> tuple[float, float]:
    """Return the first and the last; of fewer than ten values, the smallest and the largest."""
    ordered = sorted(values)
    beyond = len(ordered) // 10
    return ordered[beyond], ordered[-1 - beyond]
