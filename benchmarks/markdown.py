"""Format rows of a report: any as they are, or as a table in Markdown with its caption."""

from __future__ import annotations

from collections.abc import Callable

from .names import LOWER_BOUND

TIME_AND_MEMORY = "forward + backward, ms / GiB"
FEW = 8  # numbers of a list that are all shown: errors of gradients

Row = dict


def document(report: dict, cells: list[list[str]], note: str) -> str:
    """Format cells, the first line as heading, and on what, when, by which benchmark and how it was
    measured: ``measured`` has versions and commands.
    """
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    rows = [row for value in report.values() if isinstance(value, list) for row in value]
    count = max((row.get("gpus", 1) for row in rows), default=1)
    where = f"{'One' if count == 1 else count} {report['gpu']}"
    benchmark = " ".join(report["command"].split()[:4])  # python -m benchmarks NAME
    caption = f"{where}, {report['date']}, `{benchmark}`{note}"
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", caption])


def versions_of(*reports: dict) -> str:
    """List the versions that were measured; where reports differ, each of a package's."""
    found: dict[str, dict[str, None]] = {}
    for report in reports:
        for name, version in report["versions"].items():
            found.setdefault(name, {})[version] = None
    return ", ".join(f"{name} {' and '.join(versions)}" for name, versions in found.items())


def measured(report: dict) -> str:
    """Say with which versions and commands a report was measured."""
    first = f"{report['gpu']}, {report['date']}, {versions_of(report)}"
    return "\n  ".join([first, *report["command"].split("; ")])


def case_of(row: Row) -> str:
    return row["case"]


def model_of(row: Row) -> str:
    return row["model"]


def head_and_tokens(row: Row) -> str:
    head = row["case"].removesuffix(f", N {row['tokens']}")
    return f"{head}, {row['tokens']} tokens"


def time_and_memory(row: Row) -> str:
    if "failure" in row:
        return row["failure"].partition(":")[0]
    if row.get("wrong"):
        errors = row.get("gradient_errors")
        return f"gradient off by {max(errors):.1%}" if errors else "wrong"
    if row["contender"] == LOWER_BOUND:
        return f"{row['ms']:.1f}"
    if not row.get("fused", True):
        return "not fused"
    return f"{row['ms']:.1f} / {row['peak_mib'] / 1024:.1f}"


def cells_of(
    heading: str,
    rows: list[Row],
    line_of: Callable[[Row], str],
    cell_of: Callable[[Row], str] = time_and_memory,
) -> list[list[str]]:
    """Return a line a case or model and a column a contender, each with time and peak memory, or
    with what ``cell_of`` says.
    """
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    found = {(line_of(row), row["contender"]): cell_of(row) for row in rows}
    names = dict.fromkeys(map(line_of, rows))
    lines = ([name, *(found.get((name, each), "") for each in contenders)] for name in names)
    return [[heading, *contenders], *lines]


def plain_table(rows: list[Row]) -> str:
    """Return the rows of any list: above what is the same in all of them, then a column for each
    other field. Of the losses of a training run it has the last.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    shown = {name: [_shown(row.get(name)) for row in rows] for name in names}
    same = [
        f"{name} {found[0]}" for name, found in shown.items() if len({*found}) == 1 and found[0]
    ]
    different = {name: found for name, found in shown.items() if len({*found}) > 1}
    if not different:
        return ", ".join(same)
    widths = [max(map(len, (name, *found))) for name, found in different.items()]
    lines = ([*different], *zip(*different.values(), strict=True))
    padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n".join([", ".join(same), *padded])


def _shown(value: object) -> str:
    if isinstance(value, list):
        if any(isinstance(each, dict) for each in value):  # of collectives
            return str(len(value))
        return " ".join(map(_shown, value if len(value) <= FEW else value[-1:]))
    if isinstance(value, float):
        return f"{value:.5g}" if abs(value) < 1e5 else f"{value:.0f}"
    return "" if value is None else str(value)
