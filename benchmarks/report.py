"""Read a report, and format each of its lists as a table in Markdown, for README and docs.

Tables of heads and kernels are in ``head_tables``, those of steps on one GPU in ``step_tables``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from .convergence_report import judgement, losses
from .drift_report import FACTOR, drifts, verdicts
from .head_tables import (
    heads_table,
    idle_table,
    layer_kernels_table,
    log_probs_table,
    other_gpus_table,
    readme_table,
    sweep_table,
)
from .markdown import TIME_AND_MEMORY, Row, cells_of, document, model_of
from .names import LOWER_BOUND
from .step_tables import (
    long_row_check_table,
    longest_rows_table,
    lora_steps_table,
    sft_steps_table,
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


def distributed_table(report: dict) -> str:
    rows = report["distributed_steps"]
    differ = [f"{row['model']}, {row['contender']}" for row in _with_other_collectives(rows)]
    said = f"not those of eager: {'; '.join(differ)}" if differ else "those of eager in every row"
    note = (
        ": forward and backward, time of the slowest rank, peak memory of a rank over its shards "
        f"of the weights, {{command}}. Collectives, by kind, size and number: {said}."
    )
    cells = cells_of("training step, ms / GiB a GPU", rows, model_of)
    return document(report, cells, note)


def distributed_heads_table(report: dict) -> str:
    note = (
        ": a vocabulary over all GPUs, forward and backward; time of the slowest rank, peak memory "
        "over the inputs, gradients included; {command}. One shard alone is the operator on a "
        "rank's part as if it were the whole vocabulary, without communication."
    )
    cells = cells_of(TIME_AND_MEMORY, report["distributed_heads"], model_of)
    return document(report, cells, note)


def _with_other_collectives(rows: list[Row]) -> list[Row]:
    """Return the rows whose collectives are not those of eager in the same step."""
    measured = [row for row in rows if "collectives" in row]
    eager = {row["model"]: row for row in measured if row["contender"] == "eager"}
    return [
        row
        for row in measured
        if _kinds_and_sizes(row) != _kinds_and_sizes(eager.get(row["model"], row))
    ]


def _kinds_and_sizes(row: Row) -> list[tuple]:
    return sorted((each["kind"], each["mib"], each["calls"]) for each in row["collectives"])


def convergence_table(report: dict) -> str:
    tokens = report["settings"]["batch_size"] * report["settings"]["length"]
    has_adapters = any(" + " in row["model"] for row in report["convergence"])
    weights = "a frozen base, with adapters in float32" if has_adapters else "float32 weights"
    note = (
        f" (autocast over {weights}): {tokens} tokens of Python's standard library a step, "
        "from random weights. Another seed gives other weights and another order of the text; "
        "rounded is seed 0 with each first weight moved by half an eps of bfloat16 at most. "
        "Held-out losses are those of the trained weights in an unpatched model, without autocast. "
        f"{judgement(report['convergence'])} {{command}}."
    )
    return document(report, losses(report), note)


def drift_table(report: dict) -> str:
    said = ", ".join(f"{v.engine} {v}" for v in verdicts(report["distributed_convergence"]))
    note = (
        f", {report['settings']['steps']} steps of Trainer. Rounded: each first weight moved by "
        f"half an eps at most. A patched run may drift {FACTOR:g} times as far as eager's own runs "
        f"do: {said}. {{command}}."
    )
    return document(report, drifts(report), note)


TABLES: dict[str, Callable[[dict], str]] = {  # of a report's lists, in Markdown
    "results": readme_table,
    "sweep": sweep_table,
    "idle": idle_table,
    "other_gpus": other_gpus_table,
    "steps": steps_table,
    "heads": heads_table,
    "log_probs": log_probs_table,
    "sft_steps": sft_steps_table,
    "lora_steps": lora_steps_table,
    "longest_rows": longest_rows_table,
    "long_row_check": long_row_check_table,
    "distributed_steps": distributed_table,
    "distributed_heads": distributed_heads_table,
    "convergence": convergence_table,
    "distributed_convergence": drift_table,
    "layer_kernels": layer_kernels_table,
}


def tables(report: dict) -> list[str]:
    """Return the table of each list that the report has."""
    return [table(report) for key, table in TABLES.items() if report.get(key)]
