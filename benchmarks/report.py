"""Read a report, and format each of its lists as a table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from .markdown import measured, plain_table
from .names import LOWER_BOUND, OURS
from .quoted_tables import (
    convergence_table,
    distillation_table,
    distributed_table,
    longest_rows_table,
    lora_steps_table,
    readme_table,
    rl_steps_table,
    soak_table,
    steps_table,
)

RESULTS = Path(__file__).parent / "results"


OURS_LAYERS = f"{OURS}, layers"  # in files of STEPS: with layers on kernels, as is the default
STEPS = "steps", "sft_steps", "convergence"  # lists of reports, of whole models
TABLES: dict[str, Callable[[dict], str]] = {  # that documents quote, in Markdown
    "results": readme_table,
    "steps": steps_table,
    "distillation": distillation_table,
    "rl_steps": rl_steps_table,
    "lora_steps": lora_steps_table,
    "longest_rows": longest_rows_table,
    "distributed_steps": distributed_table,
    "convergence": convergence_table,
    "soaks": soak_table,
}


def read(path: Path) -> dict:
    """Read a report, with the names that documents and pictures show for whole models:
    "liger_patch" is the default, ``layers=True``, as it is everywhere else.

    Those of before November 23, 2026 have another command and another name of the lower bound.
    ``runs`` says how those of its lists were measured that are of another run.
    """
    text = path.read_text(encoding="utf-8").replace('"bare products"', f'"{LOWER_BOUND}"')
    report = json.loads(text)
    for row in (row for key in STEPS for row in report.get(key, ())):
        row["contender"] = _by_default(row["contender"])
    was = r"python benchmarks/(\w+)\.py"
    return report | {"command": re.sub(was, r"python -m benchmarks \1", report["command"])}


def _by_default(contender: str) -> str:
    if contender.startswith(OURS_LAYERS):
        return OURS + contender.removeprefix(OURS_LAYERS)
    if contender.startswith(OURS):
        return f"{OURS_LAYERS}=False{contender.removeprefix(OURS)}"
    return contender


def tables(report: dict) -> list[str]:
    """Return a table of each list of the report."""
    found = []
    for key, rows in report.items():
        if not isinstance(rows, list):
            continue
        of_run = report.get("runs", {}).get(key)
        parts = [] if of_run is None else [measured(report | of_run)]
        parts.append(TABLES[key](report) if key in TABLES else f"{key}: {plain_table(rows)}")
        found.append("\n".join(parts))
    return found
