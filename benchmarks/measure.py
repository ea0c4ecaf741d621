"""Times and memory of competing functions, interleaved in one process, on one GPU."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

MIB = 2**20


@dataclass(frozen=True)
class Measurement:
    """Median time of one call, its spread, and its peak memory over what was allocated before it.

    Attributes:
        ms: median over the rounds, by CUDA events.
        ms_low, ms_high: first and last decile.
        peak_mib: MiB.
    """

    ms: float
    ms_low: float
    ms_high: float
    peak_mib: float


def measure(
    functions: Mapping[str, Callable[[], object]],
    *,
    before: Callable[[], object],
    warmup: int = 3,
    rounds: int = 20,
) -> dict[str, Measurement]:
    """Run every function ``warmup`` times, then all of them in turn, ``rounds`` times.

    A GPU at its power limit clocks higher after a light load: so the turns are interleaved in an
    order that is drawn anew for each round, and ``before`` runs, untimed, in front of each. What a
    call returns is dropped before the next.
    """
    peaks = {}
    for name, function in functions.items():
        for _ in range(warmup):
            function()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        allocated = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        peaks[name] = (torch.cuda.max_memory_allocated() - allocated) / MIB
    times: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            function = functions[name]
            before()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(stop))
    return {
        name: Measurement(statistics.median(t), _decile(t, 0.1), _decile(t, 0.9), peaks[name])
        for name, t in times.items()
    }


def _decile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]
