"""Read a report, and format each of its lists as a table in Markdown, for README and docs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .distributed_tables import distributed_heads_table, distributed_table, drift_table
from .head_tables import (
    distillation_table,
    heads_table,
    idle_table,
    layer_kernels_table,
    log_probs_table,
    other_gpus_table,
    quack_table,
    readme_table,
    sweep_table,
)
from .names import LOWER_BOUND
from .step_tables import (
    convergence_table,
    long_row_check_table,
    longest_rows_table,
    lora_steps_table,
    rl_steps_table,
    sft_steps_table,
    soak_table,
    steps_table,
)

RESULTS = Path(__file__).parent / "results"


def read(path: Path) -> dict:
    """Read a report. Those of before November 23, 2026 have another command and another name of
    the lower bound. ``runs`` says how those of its lists were measured that are of another run.
    """
    text = path.read_text(encoding="utf-8").replace('"bare products"', f'"{LOWER_BOUND}"')
    report = json.loads(text)
    was = r"python benchmarks/(\w+)\.py"
    return report | {"command": re.sub(was, r"python -m benchmarks \1", report["command"])}


TABLES: dict[str, Callable[[dict], str]] = {  # of a report's lists, in Markdown
    "results": readme_table,
    "sweep": sweep_table,
    "idle": idle_table,
    "quack": quack_table,
    "other_gpus": other_gpus_table,
    "other_gpus_h100": partial(other_gpus_table, key="other_gpus_h100"),
    "steps": steps_table,
    "heads": heads_table,
    "log_probs": log_probs_table,
    "distillation": distillation_table,
    "sft_steps": sft_steps_table,
    "rl_steps": rl_steps_table,
    "lora_steps": lora_steps_table,
    "longest_rows": longest_rows_table,
    "long_row_check": long_row_check_table,
    "distributed_steps": distributed_table,
    "distributed_heads": distributed_heads_table,
    "convergence": convergence_table,
    "distributed_convergence": drift_table,
    "layer_kernels": layer_kernels_table,
    "soaks": soak_table,
}


def tables(report: dict) -> list[str]:
    """Return the table of each list that the report has."""
    return [table(report) for key, table in TABLES.items() if report.get(key)]
