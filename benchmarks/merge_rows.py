"""Merge the longest rows of another run into a report."""

from __future__ import annotations

LIST = "longest_rows"


def merged(report: dict, other: dict) -> dict:
    """Return the report with the rows of another run, which gets the next number.

    A length that is new, exact or longer replaces that of the same model, contender and memory.
    Times of each run stay on lines of their own.

    Raises:
        ValueError: one of them has no longest rows, or GPU or versions differ.
    """
    for each in (report, other):
        if not each.get(LIST):
            raise ValueError(f"a report must have {LIST}, got one of {each['command']!r}")
    for name in ("gpu", "versions"):
        if report[name] != other[name]:
            raise ValueError(
                f"{name} must be that of the report, {report[name]}, got {other[name]} of "
                f"{other['command']!r}"
            )
    rows = [{"run": 1, **row} for row in report[LIST]]
    run = 1 + max(row["run"] for row in rows)
    places = {_key(row): i for i, row in enumerate(rows)}
    for row in other[LIST]:
        row = {**row, "run": run}
        place = places.get(_key(row))
        if place is None:
            rows.append(row)
        elif _is_better(row, rows[place]):
            rows[place] = row
    return report | {
        "command": f"{report['command']}; {other['command']}",
        "date": _dates(report["date"], run, other["date"]),
        LIST: rows,
    }


def _key(row: dict) -> tuple:
    of_one_run = row["run"] if "timed" in row else None
    return row["model"], row["contender"], row.get("gib"), row.get("timed"), of_one_run


def _is_better(row: dict, before: dict) -> bool:
    if "tokens" not in row or "tokens" not in before:
        return "tokens" not in before
    return not row.get("at_least") or row["tokens"] > before["tokens"]


def _dates(date: str, run: int, other: str) -> str:
    first, _, rest = date.partition(" (")
    if other == first:
        return date
    named = [*([rest.removesuffix(")")] if rest else []), f"run {run}: {other}"]
    return f"{first} ({', '.join(named)})"
