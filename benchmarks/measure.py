"""Times and memory of competing functions, interleaved in one process, on one device."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from attempts import Failure, attempt

MIB = 2**20
LOAD_MS = 40.0  # of products: after 10 the clock is still above what it holds in a sustained run
MOST_LOADS = 1000
HOST_CALLS = 5  # for a median


@dataclass(frozen=True)
class Measurement:
    """Median time of one call, its spread, and its peak memory over what was allocated before it.

    Attributes:
        ms: median over the rounds, by CUDA events.
        ms_low, ms_high: first and last decile.
        peak_mib: MiB.
        host_ms: median time until the call returns, of a device that is idle before it.
    """

    ms: float
    ms_low: float
    ms_high: float
    peak_mib: float
    host_ms: float


def measure(
    functions: Mapping[str, Callable[[], object]],
    *,
    before: Callable[[], object] | None = None,
    load_ms: float = LOAD_MS,
    rounds: int = 10,
    device: torch.device | str = "cuda",
) -> dict[str, Measurement | Failure]:
    """Weigh every function, then time all of them in turn, ``rounds`` times.

    Each is called once before it is weighed, and all take a turn before the timed ones, which fills
    the allocator's cache. A GPU at its power limit clocks higher after a light load: so the turns
    are interleaved in an order that is drawn anew for each round, and in front of each ``before``
    runs, untimed, as often as takes ``load_ms``: shorter loads of products than LOAD_MS leave a
    clock that no training step holds. What a call returns is dropped before the next. A function
    that fails has no more turns.
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
            ms = attempt(lambda name=name: _ms(functions[name], kind))
            if isinstance(ms, Failure):
                results[name] = ms
                order.remove(name)
            elif turn > 0:
                times[name].append(ms)
    for name in order:
        t = times[name]
        host_ms = attempt(lambda name=name: _host_ms(functions[name], kind))
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


def _ms(function: Callable[[], object], kind: str) -> float:
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
    """How often the function must run to keep the device busy for so long."""
    if kind != "cuda":
        return 1
    _ms(function, kind)
    return max(1, math.ceil(ms / max(_ms(function, kind), ms / MOST_LOADS)))


def _host_ms(function: Callable[[], object], kind: str) -> float:
    times = []
    for _ in range(HOST_CALLS):
        if kind == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def _deciles(values: list[float]) -> tuple[float, float]:
    """The first and the last: of fewer than ten values, the least and the greatest."""
    ordered = sorted(values)
    beyond = len(ordered) // 10
    return ordered[beyond], ordered[-1 - beyond]
