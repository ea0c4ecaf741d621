"""Compare patched runs with eager's, in units of how far eager's seeds are apart; format tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """How one patched run ended.

    Attributes:
        model: ``model_type``.
        contender: its name.
        difference: of its last held-out loss from that of eager with the same seed, in nats.
        spread: from the lowest to the highest last held-out loss of eager's seeds, in nats.
        fused: whether its last loss was fused; otherwise the comparison means nothing.
    """

    model: str
    contender: str
    difference: float
    spread: float
    fused: bool

    @property
    def holds(self) -> bool:
        return self.fused and abs(self.difference) <= self.spread  # False for nan

    def __str__(self) -> str:
        if not self.fused:
            return "not fused"
        return f"{'less' if self.holds else 'NOT less'} than seeds differ"


def verdicts(rows: list[dict]) -> list[Verdict]:
    """Return one for each patched run of each model."""
    found = []
    for model, runs in by_model(rows).items():
        seeds = by_seed(runs)
        ends = [run["held_out"][-1] for run in seeds.values()]
        for run in runs:
            if run["patched"]:
                difference = run["held_out"][-1] - seeds[run["seed"]]["held_out"][-1]
                spread = max(ends) - min(ends)
                found.append(Verdict(model, run["contender"], difference, spread, run["fused"]))
    return found


def by_model(rows: list[dict]) -> dict[str, list[dict]]:
    """Return the runs of each model."""
    return {
        model: [row for row in rows if row["model"] == model]
        for model in dict.fromkeys(row["model"] for row in rows)
    }


def by_seed(runs: list[dict]) -> dict[int, dict]:
    """Return eager's run of each seed: the first unpatched one."""
    found: dict[int, dict] = {}
    for run in runs:
        if not run["patched"]:
            found.setdefault(run["seed"], run)
    return found


def curve_difference(run: dict, other: dict) -> float:
    """Return the mean absolute difference of the training losses, in nats."""
    pairs = list(zip(run["training"], other["training"], strict=True))
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def losses(report: dict) -> list[list[str]]:
    """Return cells: a line a model, the last held-out losses, eager's other seeds in one column."""
    lines = []
    for runs in by_model(report["convergence"]).values():
        eager, *others = by_seed(runs).values()
        line = {"": _trained(eager), eager["contender"]: _end(eager)}
        line["eager, other seeds"] = ", ".join(map(_end, others))
        for run in runs:
            if run is not eager and run["seed"] == eager["seed"]:
                difference = run["held_out"][-1] - eager["held_out"][-1]
                line[run["contender"]] = f"{_end(run)} ({difference:+.4f})"
        lines.append(line)
    heading = f"held-out loss after {report['settings']['steps']} steps"
    return [[heading, *list(lines[0])[1:]], *(list(line.values()) for line in lines)]


def judgement(rows: list[dict]) -> str:
    """Say every verdict in one sentence, and how far training curves are apart in another."""
    wrong = [f"{v.model}, {v.contender} ({v})" for v in verdicts(rows) if not v.holds]
    if wrong:
        ends = f"NOT every patched run ends as near to eager's as seeds do: {'; '.join(wrong)}."
    else:
        ends = "Every patched run ends nearer to eager's than the furthest of its seeds are apart."
    apart: dict[bool, list[float]] = {True: [], False: []}
    for runs in by_model(rows).values():
        eager = runs[0]
        for run in runs[1:]:
            if run["seed"] == eager["seed"]:
                apart[run["patched"]].append(curve_difference(run, eager))
    return (
        f"{ends} The training loss of a step differs from eager's by {_range(apart[True])} on "
        f"average where patched, by {_range(apart[False])} where rounded."
    )


def _trained(run: dict) -> str:
    return f"{run['model']}, {run['parameters'] / 1e6:.0f} M parameters"


def _end(run: dict) -> str:
    return f"{run['held_out'][-1]:.4f}"


def _range(numbers: list[float]) -> str:
    low, high = f"{min(numbers):.4f}", f"{max(numbers):.4f}"
    return low if low == high else f"{low} to {high}"
