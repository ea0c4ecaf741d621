"""Show estimates as a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from liger_patch.estimate.estimate import CARDS, GIB, LONGEST, PARTS, Estimate, most_positions
from liger_patch.estimate.model import TrainingStep, build, dtype_name, model_class_name
from liger_patch.readers.wrapped_model import transformers_model
from liger_patch.registry import is_tested

WIDTH = 26  # characters of a column of the table


def report(
    name: str, config: Any, step: TrainingStep, estimates: Sequence[Estimate], *, as_json: bool
) -> str:
    """Return the estimates of a model as a table, or as JSON with sizes in bytes."""
    model, sizes = build(config, step)
    class_name, tested = model_class_name(config), is_tested(transformers_model(model))
    found = notes(class_name, tested, estimates)
    if as_json:
        values = {
            "model": name,
            "class": class_name,
            "tested": tested,
            "parameters": sizes.parameters,
            "settings": asdict(step),
            "contenders": [asdict(each) | {"peak": each.peak} for each in estimates],
            "notes": found,
        }
        return json.dumps(values, indent=1, default=dtype_name)
    words = [
        f"{name} as {class_name}: {sizes.parameters / 1e9:.2f} billion parameters",
        f"{step.batch} x {step.length}",
        *step.in_words(),
    ]
    positions = most_positions(config)
    ends = "" if positions is None else f"; its positions end at {positions:,}"
    return _table(", ".join(words) + ends, estimates, found)


def _table(title: str, estimates: Sequence[Estimate], notes: Sequence[str]) -> str:
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
        texts = ["-" if not n else f"{'>= ' if n >= LONGEST else ''}{n:,}" for n in found]
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
            "depends on the length, or it takes no longer ones. --length estimates the peak of "
            "another length."
        )
    return found


def _line(first: str, others: Sequence[str]) -> str:
    return f"{first:<32}" + "".join(f"{each:>{WIDTH}}" for each in others)
