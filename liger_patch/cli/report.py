"""Print estimates as a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from liger_patch.estimate.estimate import CARDS, GIB, PARTS, Estimate, tokens_in_words
from liger_patch.estimate.model import TrainingStep, dtype_name

WIDTH = 26  # characters of the first column


def table(title: str, estimates: Sequence[Estimate], notes: Sequence[str] = ()) -> str:
    """Return the parts of each peak in GiB, the longest sequences that fit, and the notes. With
    offloaded checkpoints, also the host memory that each of these takes.
    """
    names = [each.name for each in estimates]
    lines = [title, "", _line("GiB at the peak", names)]
    for part in PARTS:
        sizes = [each.parts.get(part, 0) / GIB for each in estimates]
        if any(sizes):
            lines.append(_line(part, [f"{size:.2f}" if size else "-" for size in sizes]))
    lines.append(_line("peak", [f"{each.peak / GIB:.2f}" for each in estimates]))
    hosts = [each.host / GIB for each in estimates]
    if any(hosts):
        lines.append(_line("host memory", [f"{size:.2f}" if size else "-" for size in hosts]))
    lines += ["", _line("tokens of a sequence, at most", names)]
    for card in CARDS:
        found = [each.longest.get(card) for each in estimates]
        texts = ["-" if not tokens else tokens_in_words(tokens) for tokens in found]
        lines.append(_line(f"{card} GiB", texts))
    if any(size for each in estimates for size in each.longest_host.values()):
        lines += ["", _line("GiB of host memory for these", names)]
        for card in CARDS:
            sizes = [each.longest_host.get(card, 0) / GIB for each in estimates]
            lines.append(_line(f"{card} GiB", [f"{size:.1f}" if size else "-" for size in sizes]))
    return "\n".join([*lines, *(f"\n{each}" for each in notes)])


def notes(class_name: str, is_tested: bool, estimates: Sequence[Estimate]) -> list[str]:
    """Return what a reader of the estimates must know beside them, in sentences."""
    found = []
    if not is_tested:
        found.append(
            f"liger_patch has no test of {class_name}: apply_patch compares its first call with "
            "labels with the model's own loss. That comparison also holds ordinary logits, and is "
            "not estimated."
        )
    unknown = [each.name for each in estimates if not each.longest]
    if unknown:
        whose = "" if len(unknown) == len(estimates) else f" of {'; '.join(unknown)}"
        found.append(
            f"The longest sequences{whose} are not estimated: how many tensors {class_name} makes "
            "depends on the length. --length estimates the peak of another length."
        )
    return found


def _line(first: str, others: Sequence[str]) -> str:
    return f"{first:<32}" + "".join(f"{each:>{WIDTH}}" for each in others)


def title(
    model: str, class_name: str, step: TrainingStep, parameters: int, most_positions: int | None
) -> str:
    """Return what was estimated, in a line, and how long the model's own positions are."""
    words = [
        f"{model} as {class_name}: {parameters / 1e9:.2f} billion parameters",
        f"{step.batch} x {step.length}",
        *step.in_words(),
    ]
    line = ", ".join(words)
    return line if most_positions is None else f"{line}; its positions end at {most_positions:,}"


def as_json(
    model: str,
    class_name: str,
    step: TrainingStep,
    parameters: int,
    estimates: Sequence[Estimate],
    is_tested: bool,
    notes: Sequence[str],
) -> str:
    """Return the same as JSON; sizes in bytes."""
    found = {
        "model": model,
        "class": class_name,
        "tested": is_tested,
        "parameters": parameters,
        "settings": asdict(step),
        "contenders": [asdict(each) | {"peak": each.peak} for each in estimates],
        "notes": notes,
    }
    return json.dumps(found, indent=1, default=dtype_name)
