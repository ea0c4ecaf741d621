"""Run a training script as it is, and patched, each in a process of its own, and compare."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

WAYS = ("as it is", "patched")
CHILD = "import sys; from liger_patch.cli.run import measure; measure(*sys.argv[1:])"
LEAST_STEPS = 10  # timed, of a median that says something
NEVER = "never trains: it calls neither Trainer.train() nor the step() of an optimizer"
NO_MODEL = "no model reached a Trainer or came from from_pretrained"
ON_CPU = (
    "no kernel ran on this device: layers are the model's own, and a fused loss is PyTorch's "
    "operations. A GPU's times and memory will differ"
)


def compare(script: str, arguments: Sequence[str], steps: int, file: Path | None) -> int:
    """Run a script twice, print the table, and return the exit status."""
    runs: dict[str, Any] = {}
    for way in WAYS:
        print(f"liger_patch: {script}, {way}", file=sys.stderr, flush=True)
        found = _measure(way, script, arguments, steps)
        if not found["losses"]:
            print(f"{script} {found['error'] or NEVER}", file=sys.stderr)
            if not found["error"] or way == "patched":
                return 1
        runs[way] = found
    pairs = list(zip_longest(*(runs[way]["losses"] for way in WAYS)))
    known = [(abs(a - b), step) for step, (a, b) in enumerate(pairs, 1) if None not in (a, b)]
    notes = _notes(script, steps, [runs[way] for way in WAYS])
    largest = max(known, default=None, key=lambda each: (each[0] != each[0], each))  # nan first
    print(_table(script, [runs[way] for way in WAYS], pairs, largest, notes))
    if file is not None:
        report = {"script": script, "arguments": list(arguments), "steps": steps, "runs": runs}
        report |= {"largest_difference": largest and largest[0], "notes": notes}
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(runs["patched"]["status"] is None)


def _measure(way: str, script: str, arguments: Sequence[str], steps: int) -> dict:
    """Return what was measured; of a script that failed, the error alone."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured.json")
        given = [str(file), str(steps), way, script, *arguments]
        # to stderr (2): what the script prints is no part of the table
        done = subprocess.run([sys.executable, "-c", CHILD, *given], stdout=2, check=False)
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if done.returncode or not found:  # os._exit leaves no file
            error = found.get("error") or f"exit status {done.returncode}"
            return {"losses": [], "milliseconds": [], "peak_bytes": None,
                "error": f"failed {way}: {error}"}  # fmt: skip
        return found


def _notes(script: str, steps: int, runs: Sequence[Any]) -> list[str]:
    """Return what a reader of the table must know."""
    patched, notes = runs[1], list(runs[1]["notes"])
    if patched["status"] is None:
        notes = [f"nothing was patched: {'; '.join(notes) or NO_MODEL}"]
    elif patched["fused"] is None:
        notes.append("the model was not called with labels: the script computes its loss itself")
    notes += [each["error"] for each in runs if each["error"]]
    fewest = len(patched["losses"])
    if fewest <= LEAST_STEPS:
        notes.append(f"times of fewer than {LEAST_STEPS} steps are noise: --steps 20")
    if fewest < steps:
        notes.append(f"{script} ended after {fewest} of {steps} steps")
    return notes if patched["triton"] else [*notes, ON_CPU]


def _table(script: str, runs: Any, pairs: Any, largest: Any, notes: Sequence[str]) -> str:
    patched = runs[1]
    is_patched = patched["status"] is not None
    times = [statistics.median(t) if (t := each["milliseconds"]) else None for each in runs]
    tells = is_patched and all(len(each["milliseconds"]) >= LEAST_STEPS for each in runs)
    peaks = [each["peak_bytes"] and each["peak_bytes"] / 2**20 for each in runs]
    memory = "peak memory, MiB" + ("" if "cuda" in patched["device"] else " (process)")
    rows = [
        ("", WAYS[0], "patched" if is_patched else "not patched", "change"),
        ("ms a step, median", *_shown(times, ".1f"), _change(*times) * tells),
        (memory, *_shown(peaks, ".0f"), _change(*peaks)),
    ]
    for step, pair in enumerate(pairs, 1):
        change = "" if None in pair else f"{pair[1] - pair[0]:+.2g}"
        rows.append((f"loss, step {step}", *_shown(pair, ".6g"), change))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, notes = ([], notes) if is_patched else (notes[:1], notes[1:])
    lines = [*first, f"{script}, {patched['trainer'] or 'a loop of its own'}"]
    for name, *cells in rows:
        right = (f"{cell:>{n}}" for cell, n in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([f"{name:<{widths[0]}}", *right]).rstrip())
    if largest is not None:
        lines.append("largest difference of a loss: {:.2g} (step {})".format(*largest))
    status = patched["status"] or []
    width = max((len(name) for name, _ in status), default=0)
    lines += ["", *(f"{name:<{width}}  {value}" for name, value in status)]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _shown(values: Sequence[float | None], form: str) -> list[str]:
    return ["-" if each is None else format(each, form) for each in values]


def _change(before: float | None, after: float | None) -> str:
    return f"{100 * (after / before - 1):+.0f} %" if before and after else ""
