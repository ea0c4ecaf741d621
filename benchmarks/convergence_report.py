"""Training runs in words: a table on the terminal, and what the documents say of them."""

from __future__ import annotations

from convergence_verdict import by_model, by_seed, curve_difference, verdicts


def terminal_convergence_table(rows: list[dict]) -> str:
    """The runs of one model: last held-out loss, how far it is from eager's, and the verdict.

    The last number of a line is the mean absolute difference of the training losses from eager's.
    """
    eager = rows[0]
    said = {verdict.contender: verdict for verdict in verdicts(rows)}
    columns = f"{'held-out':>10s}{'difference':>12s}{'spread':>10s}{'training':>10s}"
    lines = [_trained(eager), f"  {'':24s}{columns}"]
    for row in rows:
        line = f"  {row['contender']:24s}{row['held_out'][-1]:10.5f}"
        if row is not eager:
            line += f"{row['held_out'][-1] - eager['held_out'][-1]:+12.5f}"
            verdict = said.get(row["contender"])
            line += f"{verdict.spread:10.5f}" if verdict else " " * 10
            line += f"{curve_difference(row, eager):10.5f}"
            line += f"  {verdict}" if verdict else ""
        lines.append(line)
    return "\n".join(lines)


def losses_table(report: dict) -> str:
    """Markdown: a line a model; the last held-out losses, those of eager's other seeds together."""
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
    steps = report["settings"]["steps"]
    header = [f"held-out loss after {steps} steps", *list(lines[0])[1:]]
    cells = [header, ["---"] * len(header), *(line.values() for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def judgement(rows: list[dict]) -> str:
    """Every verdict in one sentence, and the training curves in another."""
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
