"""Run a training script as it is, and patched, each in a process of its own, and compare."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WAYS = ("as it is", "patched")
CHILD = "import sys; from liger_patch.cli.run import measure; measure(*sys.argv[1:])"
LEAST_STEPS = 10  # of a median that says something
NEVER = "never trains: it calls neither Trainer.train() nor the step() of an optimizer"
NONE_PATCHED = "no model was patched: none reached a Trainer or came from from_pretrained"
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
        problem = f"failed {way}" if found is None else NEVER
        if not found or not found["losses"]:
            print(f"{script} {problem}", file=sys.stderr)
            return 1
        runs[way] = found
    pairs = list(zip(*(runs[way]["losses"] for way in WAYS), strict=False))
    known = [(abs(a - b), step) for step, (a, b) in enumerate(pairs, 1) if None not in (a, b)]
    notes = _notes(script, steps, [runs[way] for way in WAYS])
    largest = max(known, default=None, key=lambda each: (each[0] != each[0], each))  # nan first
    print(_table(script, [runs[way] for way in WAYS], pairs, largest, notes))
    if file is not None:
        report = {"script": script, "arguments": list(arguments), "steps": steps, "runs": runs}
        report |= {"largest_difference": largest and largest[0], "notes": notes}
        file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _measure(way: str, script: str, arguments: Sequence[str], steps: int) -> dict | None:
    """Return what was measured; None of a script that failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured.json")
        given = [str(file), str(steps), way, script, *arguments]
        # to stderr (2): what the script prints is no part of the table
        done = subprocess.run([sys.executable, "-c", CHILD, *given], stdout=2, check=False)
        if done.returncode or not file.exists():  # os._exit leaves no file
            print(f"{script} ended with exit status {done.returncode}, {way}", file=sys.stderr)
            return None
        return json.loads(file.read_text(encoding="utf-8"))


def _notes(script: str, steps: int, runs: Sequence[Any]) -> list[str]:
    """Return what a reader of the table must know."""
    patched, notes = runs[1], list(runs[1]["notes"])
    if patched["status"] is None and not notes:
        notes.append(NONE_PATCHED)
    elif patched["status"] is not None and patched["fused"] is None:
        notes.append("the model was not called with labels: the script computes its loss itself")
    fewest = min(len(each["losses"]) for each in runs)
    if fewest < LEAST_STEPS:
        notes.append(f"times of fewer than {LEAST_STEPS} steps are noise: --steps 20")
    if fewest < steps:
        notes.append(f"{script} ended after {fewest} of {steps} steps")
    return notes if patched["triton"] else [*notes, ON_CPU]


def _table(script: str, runs: Any, pairs: Any, largest: Any, notes: Sequence[str]) -> str:
    patched = runs[1]
    is_patched = patched["status"] is not None
    times = [statistics.median(each["milliseconds"] or [0.0]) for each in runs]
    peaks = [(each["peak_bytes"] or 0) / 2**20 for each in runs]
    memory = "peak memory, MiB" + ("" if "cuda" in patched["device"] else " (process)")
    rows = [
        ("", *WAYS, "change"),
        # without a patched model, a change is the machine's
        ("ms a step, median", *(f"{each:.1f}" for each in times), _change(*times) * is_patched),
        (memory, *(f"{each:.0f}" for each in peaks), _change(*peaks)),
    ]
    for step, pair in enumerate(pairs, 1):
        change = "" if None in pair else f"{pair[1] - pair[0]:+.2g}"
        shown = ("-" if each is None else f"{each:.6g}" for each in pair)
        rows.append((f"loss, step {step}", *shown, change))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{script}, {patched['trainer'] or 'a loop of its own'}"]
    for name, *cells in rows:
        right = (f"{cell:>{n}}" for cell, n in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([f"{name:<{widths[0]}}", *right]).rstrip())
    if largest is not None:
        lines.append("largest difference of a loss: {:.2g} (step {})".format(*largest))
    status = patched["status"] or []
    width = max((len(name) for name, _ in status), default=0)
    lines += ["", *(f"{name:<{width}}  {value}" for name, value in status)]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _change(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.0f} %" if before and after else ""
