"""Format the tables of several GPUs: training steps, heads, and how far training drifts."""

from __future__ import annotations

from .drift_report import FACTOR, drifts, verdicts
from .markdown import TIME_AND_MEMORY, Row, cells_of, document, model_of
from .names import EAGER


def distributed_table(report: dict) -> str:
    rows = report["distributed_steps"]
    differ = list(dict.fromkeys(row["model"] for row in _with_other_collectives(rows)))
    ran = {row["model"] for row in rows if row["contender"] == EAGER and "ms" in row}
    said = "all rows" if ran == {row["model"] for row in rows} else "all rows in which eager ran"
    if differ:
        said += f", except: {'; '.join(differ)}"
    note = (
        ": forward and backward, time of the slowest rank, peak memory of a rank over its shards "
        f"of the weights. The same collectives as eager in {said}."
    )
    cells = cells_of("training step, ms / GiB a GPU", rows, model_of)
    return document(report, cells, note)


def distributed_heads_table(report: dict) -> str:
    note = (
        ": a vocabulary over all GPUs, forward and backward; time of the slowest rank, peak memory "
        "over the inputs, gradients included. One shard alone is the operator on a "
        "rank's part as if it were the whole vocabulary, without communication."
    )
    cells = cells_of(TIME_AND_MEMORY, report["distributed_heads"], model_of)
    return document(report, cells, note)


def drift_table(report: dict) -> str:
    said = ", ".join(f"{v.engine} {v}" for v in verdicts(report["distributed_convergence"]))
    note = (
        f": {report['settings']['steps']} steps of Trainer. Rounded: each first weight moved by "
        "half an eps at most, anew in each run. A patched run may drift "
        f"{FACTOR:g} times as far as eager's own runs do: {said}."
    )
    return document(report, drifts(report), note)


def _with_other_collectives(rows: list[Row]) -> list[Row]:
    """Return the rows whose collectives are not those of eager in the same step."""
    measured = [row for row in rows if "collectives" in row]
    eager = {row["model"]: row for row in measured if row["contender"] == EAGER}
    return [
        row
        for row in measured
        if _kinds_and_sizes(row) != _kinds_and_sizes(eager.get(row["model"], row))
    ]


def _kinds_and_sizes(row: Row) -> list[tuple]:
    return sorted((each["kind"], each["mib"], each["calls"]) for each in row["collectives"])
