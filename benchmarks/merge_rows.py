"""Merge the longest rows of another run into a report."""

from __future__ import annotations

LIST = "longest_rows"


def merged(report: dict, other: dict) -> dict:
    """Return the report with the rows of another run, which gets the next number.

    A length that is new, exact or longer replaces that of the same model, contender and memory, and
    a shorter lower bound of more memory. A package that one run had not installed may have any
    version. Times of each run stay on lines of their own.

    Raises:
        ValueError: one of them has no longest rows, or GPU or versions differ.
    """
    for each in (report, other):
        if not each.get(LIST):
            raise ValueError(f"a report must have {LIST}, got one of {each['command']!r}")
    versions, others = report["versions"], other["versions"]
    for name, own, its in (
        ("gpu", report["gpu"], other["gpu"]),
        *((name, own, others[name]) for name, own in versions.items() if name in others),
    ):
        if own != its:
            raise ValueError(
                f"{name} must be that of the report, {own}, got {its} of {other['command']!r}"
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
        "versions": versions | others,
        "date": _dates(report["date"], run, other["date"]),
        LIST: [_at_least(row, rows) for row in rows],
    }


def _at_least(row: dict, rows: list[dict]) -> dict:
    """Return the row; for a lower bound, the longest of those that fit less memory."""
    if not row.get("at_least"):
        return row
    same = row["model"], row["contender"]
    fitting = [
        each
        for each in rows
        if (each["model"], each["contender"]) == same
        and "tokens" in each
        and each["gib"] < row["gib"]
    ]
    longest = max([row, *fitting], key=lambda each: each["tokens"])
    return {**longest, "gib": row["gib"], "at_least": True}


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
