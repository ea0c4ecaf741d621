"""Whether a patched run ends where eager does, as far as eager's own seeds allow to say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """One patched run.

    Attributes:
        model: ``model_type``.
        contender: its name.
        difference: of its last held-out loss from that of eager with the same seed, in nats.
        spread: from the lowest to the highest last held-out loss of eager's seeds, in nats.
        fused: whether its last loss was fused; where it was not, the comparison says nothing.
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
    """One for each patched run of each model."""
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
    """The runs of each model."""
    return {
        model: [row for row in rows if row["model"] == model]
        for model in dict.fromkeys(row["model"] for row in rows)
    }


def by_seed(runs: list[dict]) -> dict[int, dict]:
    """Eager with each seed: the first unpatched run that has it."""
    found: dict[int, dict] = {}
    for run in runs:
        if not run["patched"]:
            found.setdefault(run["seed"], run)
    return found


def curve_difference(run: dict, other: dict) -> float:
    """Mean absolute difference of the training losses, in nats."""
    pairs = list(zip(run["training"], other["training"], strict=True))
    return sum(abs(a - b) for a, b in pairs) / len(pairs)
