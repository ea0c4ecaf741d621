"""Find the longest row that one contender trains, in the process that ``longest_row.py`` starts.

A step of a long row takes a minute, and its peak memory grows linearly with the row. So the first
length that is tried is where the line through two measured peaks meets the limit.
"""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoConfig

from . import lora_contenders
from .attention_blocks import BLOCK
from .lora_contenders import CONTENDERS, Setting
from .measure import MIB, Failure, attempt, release_memory
from .models import Model
from .training_step import run_step

GIB = 2**30
SHARE = 50  # of a row: what the search leaves open, 2 %
LIMITS = (24.0, 48.0, 80.0, 139.0)  # GiB
MOST = 2**20 + 2**18  # tokens
WHOLE = 65536  # tokens of a row that attends to all before
TIMED = (16384, 65536, 262144)
ALL_ON_HOST = ("Unsloth",)  # whose checkpoints wait in host memory, however much they take


@dataclass(frozen=True)
class Limits:
    """What is searched, and how long.

    Attributes:
        gib: of memory, ascending.
        step: tokens; rows are multiples.
        most: tokens of the longest row that is tried.
        timed: lengths whose steps are timed with all memory.
        whole: tokens of the longest row that attends to all before.
        rounds: timed steps.
        seconds: of each process; None for no limit.
        tries: GiB with a length each: only these are tried.
        host_gib: of host memory, for offloaded checkpoints; None for no limit.
        total: seconds of all processes of a model, each of which may take an even share of what is
            left; None for no limit.
    """

    gib: Sequence[float] = LIMITS
    step: int = BLOCK
    most: int = MOST
    timed: Sequence[int] = TIMED
    whole: int = WHOLE
    rounds: int = 2
    seconds: float | None = None
    tries: Sequence[tuple[float, int]] = ()
    host_gib: float | None = None
    total: float | None = None

    def seconds_left(self, elapsed: float, processes: int) -> float | None:
        """Return how long the next of so many processes may run; None for no limit."""
        shares = [] if self.total is None else [max(0.0, self.total - elapsed) / processes]
        return min([*shares, *([] if self.seconds is None else [self.seconds])], default=None)


@dataclass(frozen=True)
class Search:
    """What one process looks for.

    Attributes:
        contender: a name of CONTENDERS.
        model: name of the model in the report.
        folder: of its config, weights and tokenizer.
        setting: how it is trained.
    """

    contender: str
    model: str
    folder: str
    setting: Setting
    limits: Limits
    device: str = "cuda"


def main(request: Path, results: Path) -> None:
    """Search for what a file asks for."""
    fields = json.loads(request.read_text(encoding="utf-8"))
    fields["setting"] = Setting(**fields["setting"])
    fields["limits"] = Limits(**fields["limits"])
    lora_contenders.write(rows(Search(**fields)), results)


def rows(search: Search) -> Iterator[dict]:
    """Yield a row for each step: its length, and its time or whether it fits."""
    named = {"model": f"{search.model}, {search.setting.name}", "contender": search.contender}
    try:
        step = _stepper(search)
    except Exception:
        traceback.print_exc()  # the parent has the last line only
        raise
    known: dict[int, dict] = {}  # the peaks of each length that fits
    too_long = _beyond_host(search)
    for tokens in search.limits.timed:
        why = _why_not(tokens, too_long)
        found = why or attempt(partial(_timed, step, tokens, search))
        yield {**named, "timed": tokens, **_result(found)}
        if not isinstance(found, Failure):
            known[tokens] = found
        elif not why:
            too_long[tokens] = found
    longest = 0
    for limit in sorted(search.limits.gib):
        room = limit_memory(limit, search.device)
        fits = _Fits(step, search.device, room, known, longest, too_long)
        for tokens in fits.tried(search, limit):
            yield {**named, "gib": limit, "tokens": tokens, **_result(fits.results[tokens])}
        longest = fits.longest
        shortest = min(too_long, default=None)
        if shortest is not None and shortest not in fits.results and not search.limits.tries:
            why = too_long[shortest]
            yield {**named, "gib": limit, "tokens": shortest, "failure": why.failure}


class _Fits:
    """Tells which rows fit one limit, by training on them.

    Attributes:
        results: of the lengths that were tried.
        longest: tokens of the longest row that fits: before any is tried, of one that fits a
            smaller limit, or whose step has reserved no more than this one.
    """

    def __init__(
        self,
        step: Callable[[int], None],
        device: str,
        room: float | None,
        known: dict[int, dict],
        longest: int,
        too_long: Mapping[int, Failure],
    ) -> None:
        self._step, self._device, self._room, self._known = step, device, room, known
        self._too_long = too_long
        self.results: dict[int, dict | Failure] = {}
        reserved = {n: each["reserved_mib"] for n, each in known.items() if _peaks(each)}
        fitting = [n for n, mib in reserved.items() if room is not None and mib <= room]
        self.longest = max([longest, *fitting])

    def tried(self, search: Search, limit: float | None) -> Iterator[int]:
        """Yield each length that is tried."""
        limits = search.limits
        if not limits.tries:
            most = min([limits.most, *(n - limits.step for n in self._too_long)])
            start = self.longest
            yield from candidates(self.fits, start, most, limits.step, self._expected)
            return
        for gib, tokens in sorted(limits.tries):
            if gib == limit and tokens > self.longest:
                is_fitting = self.fits(tokens)
                yield tokens
                if not is_fitting:
                    return

    def fits(self, tokens: int) -> bool:
        """Train on a row of so many tokens, and return whether it fits."""
        found = _why_not(tokens, self._too_long) or attempt(partial(self._measured, tokens))
        self.results[tokens] = found
        if isinstance(found, Failure):
            return False
        self._known[tokens] = found
        self.longest = max(self.longest, tokens)
        return True

    def _measured(self, tokens: int) -> dict:
        reset_peaks(self._device)
        self._step(tokens)
        return peaks(self._device)

    def _expected(self) -> int | None:
        """The allocator empties its cache before it fails, so what is allocated tells."""
        if self._room is None:
            return None
        allocated = {n: each["peak_mib"] for n, each in self._known.items() if _peaks(each)}
        return expected_longest(allocated, self._room)


def _beyond_host(search: Search) -> dict[int, Failure]:
    """Return the shortest row whose checkpoints the host has no memory for, and the failure."""
    limits = search.limits
    if limits.host_gib is None or search.contender not in ALL_ON_HOST:
        return {}
    config = AutoConfig.from_pretrained(search.folder)
    bytes_of_token = 2 * config.hidden_size * config.num_hidden_layers
    tokens = int(limits.host_gib * GIB) // bytes_of_token // limits.step * limits.step
    return {tokens + limits.step: Failure(f"{limits.host_gib:g} GiB of host memory are full")}


def _why_not(tokens: int, too_long: Mapping[int, Failure]) -> Failure | None:
    """Return the failure of a length that is not tried, None for one that may fit."""
    return next((why for shortest, why in too_long.items() if tokens >= shortest), None)


def limit_memory(gib: float | None, device: str) -> float | None:
    """Let this process allocate so much of the GPU.

    Returns:
        MiB: the limit, or what is left on the GPU beside contexts and other processes.
    """
    if device != "cuda":
        return None
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else min(1.0, gib * GIB / total))
    free, _ = torch.cuda.mem_get_info()
    room = free + torch.cuda.memory_reserved()
    return (room if gib is None else min(room, gib * GIB)) / MIB


def reset_peaks(device: str) -> None:
    """Forget the peaks of earlier steps, and give the memory back that they left reserved."""
    release_memory()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peaks(device: str) -> dict[str, float]:
    """Return the most memory that was allocated and reserved since ``reset_peaks``, in MiB."""
    if device != "cuda":
        return {}
    return {
        "peak_mib": torch.cuda.max_memory_allocated() / MIB,
        "reserved_mib": torch.cuda.max_memory_reserved() / MIB,
    }


def _peaks(row: dict) -> dict[str, float]:
    return {name: row[name] for name in ("peak_mib", "reserved_mib") if name in row}


def _stepper(search: Search) -> Callable[[int], None]:
    """Build the model, and return what trains it on a row of so many tokens."""
    sizes = (1, search.limits.most)
    request = lora_contenders.Request(
        search.contender,
        search.model,
        search.folder,
        *sizes,
        (search.setting,),
        search.limits.rounds,
        search.device,
        host_gib=search.limits.host_gib,
    )
    config = AutoConfig.from_pretrained(search.folder)
    model = CONTENDERS[search.contender](request, search.setting)
    lora_contenders.fill_adapters(model)
    loss = partial(lora_contenders.autocast_loss, model)

    def step(tokens: int) -> None:
        batch = Model(search.model, config, 1, tokens).batch(search.device)
        run_step(loss, model, batch)
        if search.device == "cuda":
            torch.cuda.synchronize()

    return step


def _timed(step: Callable[[int], None], tokens: int, search: Search) -> dict[str, float]:
    step(tokens)  # compiles kernels
    reset_peaks(search.device)
    times = []
    for _ in range(search.limits.rounds):
        start = time.perf_counter()
        step(tokens)
        times.append(1000 * (time.perf_counter() - start))
    return {"ms": statistics.median(times), **peaks(search.device)}


def _result(found: dict | Failure) -> dict:
    return {"failure": found.failure} if isinstance(found, Failure) else found


def width(tokens: int, step: int) -> int:
    """Return how close to ``tokens`` a search ends: a multiple of ``step``, about 2 %."""
    return max(step, tokens // SHARE // step * step)


def expected_longest(peaks: Mapping[int, float], room: float) -> int | None:
    """Return the tokens of which a step is expected to take all the room, None where unknown.

    Args:
        peaks: memory of the steps of some lengths.
        room: in the unit of the peaks.
    """
    lengths = sorted(peaks)
    if len(lengths) < 2:
        return None
    last = len(lengths) - 1
    i = next((i for i in range(1, last) if peaks[lengths[i]] > room), last)
    a, b = lengths[i - 1], lengths[i]
    growth = (peaks[b] - peaks[a]) / (b - a)
    return int(a + (room - peaks[a]) / growth) if growth > 0 else None


def candidates(
    fits: Callable[[int], bool],
    known: int,
    most: int,
    step: int,
    expected: Callable[[], int | None] = lambda: None,
) -> Iterator[int]:
    """Yield each length that is tried to find the longest that fits, a multiple of ``step``.

    Lengths double until one is expected. That one is tried, then longer or shorter ones in strides
    that double, until the longest is between two lengths; then their middle.

    Args:
        known: a length that fits, 0 for none.
        most: no longer row is tried.
        expected: returns the length that is expected, None as long as there is none.
    """
    top = most // step * step
    low, high = known // step * step, top + step  # fits, does not
    stride = 0  # > 0: to longer ones, < 0: to shorter ones
    is_guessed = False
    while high - low > width(high, step):
        guess = None if is_guessed else expected()
        if guess is not None:
            is_guessed = True
            tokens = min(max(guess // step * step, low + step), high - step)
        elif is_guessed:
            tokens = (low if stride > 0 else high) + stride
        else:
            tokens = max(step, 2 * low)
        if not low < tokens < high:
            is_open = high > top and tokens > low
            tokens = top if is_open else (low + high) // 2 // step * step
        is_fitting = fits(tokens)
        yield tokens
        low, high = (tokens, high) if is_fitting else (low, tokens)
        if is_guessed:
            near = width(tokens, step) * (1 if is_fitting else -1)
            stride = 2 * stride if stride * near > 0 else near
