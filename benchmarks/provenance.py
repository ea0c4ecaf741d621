"""Where and how a report was measured."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shlex
from collections.abc import Iterable
from datetime import date
from pathlib import Path

import torch
import triton


def provenance(command: str, packages: Iterable[str]) -> dict:
    """Command, date, GPU, and the versions of what took part where it is installed."""
    return {
        "command": command,
        "date": date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            **{name: version for name in packages if (version := _version(name))},
        },
    }


def command_line(script: str, arguments: argparse.Namespace) -> str:
    """The command that measures the same again, wherever its output goes."""
    options = []
    for name, value in vars(arguments).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, Path) or value is None or value is False:
            continue
        for one in value if isinstance(value, list) else [value]:
            options += [option] if one is True else [option, str(one)]
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *options])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
