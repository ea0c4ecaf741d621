"""The pictures of a report, on machines that can draw."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def draw_where_possible(report: dict, path: Path) -> None:
    """Its pictures, beside the place of the report, where Matplotlib is installed."""
    if find_spec("matplotlib") is None:
        print(f"no matplotlib here: draw it elsewhere with python benchmarks/picture.py {path}")
        return
    from picture import draw_all

    for written in (path, *draw_all(report, path)):
        print(f"wrote {written}")
