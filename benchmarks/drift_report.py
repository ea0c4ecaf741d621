"""Judge how far runs under engines of several GPUs drift from one GPU, in units of eager's drift;
format tables.
"""

from __future__ import annotations

from typing import NamedTuple

from .convergence_report import curve_difference
from .names import EAGER, OURS

ALONE, ROUNDED = "one GPU", f"{EAGER}, rounded"
FACTOR = 2.0  # as for every error in this project: ours may be twice eager's
ROUNDINGS = 4  # of the first weights: one drifts 0.0026 nats, another 0.0089
EPS = 2.0**-23  # of float32, in which a loss is logged


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
