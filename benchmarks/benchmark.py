"""Define what a benchmark declares, and what its report says of where and how it was measured."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import triton

Rows = list[dict]  # one a contender
# A list of the report to what measures its cases; rows may come one by one, to be written at once.
Cases = dict[str, list[Callable[[], Iterable[dict]]]]


@dataclass(frozen=True)
class Benchmark:
    """How one benchmark differs from the others; ``__main__.py`` runs it.

    Attributes:
        packages: whose versions the report names.
        cases: returns the cases that the options choose.
        rounds: default of --rounds, None for a benchmark without that option.
        add_options: adds the benchmark's own options.
        header: returns what else the report says in front of its lists.
        finish: prints what the whole report says, and returns the exit status.
    """

    packages: tuple[str, ...]
    cases: Callable[[argparse.Namespace], Cases]
    rounds: int | None = None
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    header: Callable[[argparse.Namespace], dict] = lambda options: {}
    finish: Callable[[dict], int] = lambda report: 0


def provenance(command: str, packages: Iterable[str]) -> dict:
    """Return command, date, GPU, and the versions of what is installed."""
    return {
        "command": command,
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            **{name: version for name in packages if (version := _version(name))},
        },
    }


def command_line(name: str, options: argparse.Namespace) -> str:
    """Return the command that measures the same again, without the place of its output."""
    words = []
    for option, value in vars(options).items():
        flag = f"--{option.replace('_', '-')}"
        if isinstance(value, Path) or value is None or value is False:
            continue
        for one in value if isinstance(value, list) else [value]:
            words += [flag] if one is True else [flag, str(one)]
    return shlex.join(["python", "-m", "benchmarks", name, *words])


def in_json(report: dict) -> str:
    """Return the report as JSON, with each row, and each list of numbers, on one line."""
    text = json.dumps(report, indent=1)
    for flat in (r"\[[^][{}\"]+\]", r"\{[^{}]*\}"):
        text = re.sub(flat, lambda found: re.sub(r"\n *", " ", found[0]), text)
    return f"{text}\n"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
