"""Find the longest row that one contender trains, in the process that ``longest_row.py`` starts."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from . import lora_contenders
from .lora_contenders import CONTENDERS, Setting
from .measure import MIB, Failure, attempt, release_memory
from .models import Model
from .training_step import run_step

GIB = 2**30


@dataclass(frozen=True)
class Search:
    """What one process looks for.

    Attributes:
        contender: a name of CONTENDERS.
        model: name of the model in the report.
        folder: of its config, weights and tokenizer.
        setting: how it is trained.
        limits: GiB of the GPU that may be used, ascending; None for all.
        step: tokens; lengths are multiples.
        most: tokens beyond which nothing is looked for.
        timed: lengths whose steps are timed with all memory.
        rounds: timed steps of each.
    """

    contender: str
    model: str
    folder: str
    setting: Setting
    limits: tuple[float | None, ...]
    step: int
    most: int
    timed: tuple[int, ...]
    rounds: int
    device: str = "cuda"


def main(request: Path, results: Path) -> None:
    """Append one line of JSON to ``results`` for each row, as soon as it is measured."""
    fields = json.loads(request.read_text(encoding="utf-8"))
    fields["setting"] = Setting(**fields["setting"])
    fields |= {name: tuple(v) for name, v in fields.items() if isinstance(v, list)}
    for row in rows(Search(**fields)):
        with results.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")


def rows(search: Search) -> Iterator[dict]:
    """Yield a row for each step: its length, and its time or whether it fits."""
    named = {"model": f"{search.model}, {search.setting.name}", "contender": search.contender}
    try:
        step = _stepper(search)
    except Exception:
        traceback.print_exc()  # the parent has the last line only
        raise
    for tokens in search.timed:
        found = attempt(partial(_timed, step, tokens, search))
        yield {**named, "timed": tokens, **_result(found)}
    longest = 0
    for limit in search.limits:
        limit_memory(limit, search.device)
        tried: dict[int, str | None] = {}  # the failure of each length

        def fits(tokens: int, tried: dict[int, str | None] = tried) -> bool:
            found = attempt(partial(step, tokens))
            release_memory()
            tried[tokens] = found.failure if isinstance(found, Failure) else None
            return tried[tokens] is None

        for tokens in candidates(fits, longest, search.most, search.step):
            why = {} if tried[tokens] is None else {"failure": tried[tokens]}
            yield {**named, "gib": limit, "tokens": tokens, **why}
        longest = max((tokens for tokens, why in tried.items() if why is None), default=longest)


def candidates(fits: Callable[[int], bool], known: int, most: int, step: int) -> Iterator[int]:
    """Yield each length that is tried to find the longest that fits, a multiple of ``step``.

    Args:
        known: a length that fits, 0 for none.
    """
    low, high = known, most + step  # fits, does not
    while high - low > step:
        doubled = max(step, 2 * low)
        middle = doubled if high > most and doubled < most else (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
        yield middle


def limit_memory(gib: float | None, device: str) -> None:
    """Let this process allocate so much of the GPU."""
    if device != "cuda":
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else min(1.0, gib * GIB / total))


def _stepper(search: Search) -> Callable[[int], None]:
    """Build the model, and return what trains it on a row of so many tokens."""
    sizes = (1, search.most)
    request = lora_contenders.Request(
        search.contender,
        search.model,
        search.folder,
        *sizes,
        (search.setting,),
        search.rounds,
        search.device,
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


def _timed(step: Callable[[int], None], tokens: int, search: Search) -> dict[str, Any]:
    step(tokens)  # compiles kernels
    if search.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(search.rounds):
        start = time.perf_counter()
        step(tokens)
        times.append(1000 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() / MIB if search.device == "cuda" else 0.0
    return {"ms": sorted(times)[len(times) // 2], "peak_mib": peak}


def _result(found: dict[str, Any] | Failure) -> dict[str, Any]:
    return {"failure": found.failure} if isinstance(found, Failure) else found
