"""Format rows of a report as a table in Markdown: lines, columns, cells and the caption."""

from __future__ import annotations

from collections.abc import Callable

from .names import LOWER_BOUND

TIME_AND_MEMORY = "forward + backward, ms / GiB"

Row = dict


def document(report: dict, cells: list[list[str]], note: str) -> str:
    """Format cells, the first line as heading, and what was measured, where and how."""
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    rows = [row for value in report.values() if isinstance(value, list) for row in value]
    count = max((row.get("gpus", 1) for row in rows), default=1)
    where = f"one {report['gpu']}" if count == 1 else f"{count} GPUs ({report['gpu']})"
    measured = f"Measured on {where} on {report['date']} in bf16 with {versions}"
    note = note.replace("{command}", _said(report["command"]))
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", measured + note])


def _said(command: str) -> str:
    """Quote the first of several commands: the file has all."""
    first, *others = command.split("; ")
    return f"`{first}`" + (f" and {len(others)} more in the file" if others else "")


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
