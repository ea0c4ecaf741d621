"""Format the tables of several GPUs: training steps, heads, and how far training drifts from one
GPU, in units of eager's drift.
"""

from __future__ import annotations

from typing import NamedTuple

from .convergence_report import curve_difference
from .markdown import TIME_AND_MEMORY, Row, cells_of, document, model_of
from .names import EAGER, OURS

ALONE, ROUNDED = "one GPU", f"{EAGER}, rounded"
FACTOR = 2.0  # as for every error in this project: ours may be twice eager's
ROUNDINGS = 4  # of the first weights: one drifts 0.0026 nats, another 0.0089
EPS = 2.0**-23  # of float32, in which a loss is logged


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


class Verdict(NamedTuple):
    """How far a patched run has drifted from eager on one GPU, in nats, and how far it may.

    Attributes:
        fused: whether its last loss was; otherwise the comparison means nothing.
    """

    engine: str
    drift: float
    allowed: float
    fused: bool

    @property
    def holds(self) -> bool:
        return self.fused and self.drift <= self.allowed  # False for nan

    def __str__(self) -> str:
        if not self.fused:
            return "not fused"
        return f"{'as close as' if self.holds else 'FARTHER than'} eager's"


def verdicts(rows: list[dict]) -> list[Verdict]:
    """Return one for each engine, and for one GPU."""
    runs = {(row["engine"], row["contender"]): row for row in rows}
    truth = runs[ALONE, EAGER]
    rounding = EPS * sum(truth["training"]) / len(truth["training"])
    rounded = [row for row in rows if row["contender"] == ROUNDED]
    least = max(rounding, *(curve_difference(row, truth) for row in rounded))
    found = []
    for engine in dict.fromkeys(row["engine"] for row in rows):
        eager, ours = runs[engine, EAGER], runs[engine, OURS]
        allowed = FACTOR * max(least, curve_difference(eager, truth))
        found.append(Verdict(engine, curve_difference(ours, truth), allowed, ours["fused"]))
    return found


def terminal_drift_table(rows: list[dict]) -> str:
    """Format the last loss of each run, its drift from eager on one GPU, and the verdicts."""
    said = {verdict.engine: verdict for verdict in verdicts(rows)}
    lines = [f"{'':28s}{'last loss':>10s}{'drift':>12s}{'allowed':>12s}"]
    for row in rows:
        name = f"{row['engine']}, {row['contender']}"
        line = f"{name:28s}{row['training'][-1]:10.5f}{curve_difference(row, rows[0]):12.2e}"
        if row["patched"]:
            verdict = said[row["engine"]]
            line += f"{verdict.allowed:12.2e}  {verdict}"
        lines.append(line)
    return "\n".join(lines)


def drifts(report: dict) -> list[list[str]]:
    """Return cells: a line an engine, the drift of eager and of the patched run."""
    rows = report["distributed_convergence"]
    names = [EAGER, ROUNDED, OURS]
    cells = [["mean difference of the training losses from eager on one GPU, nats", *names]]
    for engine in dict.fromkeys(row["engine"] for row in rows):
        runs = [row for row in rows if row["engine"] == engine]
        of_each = [
            [curve_difference(r, rows[0]) for r in runs if r["contender"] == n] for n in names
        ]
        cells.append([engine, *(", ".join(f"{each:.4f}" for each in found) for found in of_each)])
    return cells
