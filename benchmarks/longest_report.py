"""Format the longest rows: a line for each memory, and one for each length that was timed; and the
check of a long row.
"""

from __future__ import annotations

import re

from .attention_blocks import BLOCK

EAGER = "eager"


def longest_cells(rows: list[dict]) -> list[list[str]]:
    """Return lines of cells, a column a contender; the first line is the heading."""
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    is_timed = any("timed" in row for row in rows)
    what = "longest row, tokens; time per token, µs" if is_timed else "longest row, tokens"
    cells = [[what, *contenders]]
    found = {(_line(row), row["contender"]): _cell(row, rows) for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))
    ordered = sorted(rows, key=lambda row: (models.index(row["model"]), row.get("gib", 0)))
    for line in dict.fromkeys(map(_line, ordered)):
        cells.append([line, *(found.get((line, each), "") for each in contenders)])
    return cells


def terminal_longest_table(rows: list[dict]) -> str:
    """Format the rows of one model for the terminal."""
    return _aligned(longest_cells(rows))


def attention_note(rows: list[dict]) -> str:
    """Say which rows attended to all tokens before, of each run that differs."""
    runs: dict[int, set[int]] = {}
    for row in rows:
        runs.setdefault(row["whole_attention"], set()).add(row.get("run", 1))
    whole, *others = sorted(runs, key=lambda tokens: min(runs[tokens]))
    differing = "".join(f"; in some runs, those of more than {tokens:,}" for tokens in others)
    return f"Rows of more than {whole:,} tokens attend within blocks of {BLOCK}{differing}."


def runs_note(rows: list[dict]) -> str:
    """Say how to read times where the report is of several runs; their rows have a ``run``."""
    if not any("run" in row and "timed" in row for row in rows):
        return ""
    return " Times are compared within a run only; a length does not depend on the run."


def of_all_runs(report: dict) -> dict:
    """Return the report with the first and the last day of its runs."""
    days = sorted(re.findall(r"\d{4}-\d\d-\d\d", report["date"]))
    return report | {"date": " to ".join(dict.fromkeys((days[0], days[-1])))}


def _line(row: dict) -> str:
    if "timed" in row:
        run = f", run {row['run']}" if "run" in row else ""  # times of two runs have no line
        return f"{row['model']}, {row['timed']:,} tokens{run}"
    return f"{row['model']}, {row['gib']:g} GiB"


def _cell(row: dict, rows: list[dict]) -> str:
    if "failure" in row:
        return row["failure"]
    if "timed" not in row:
        ends = f" ({row['ends_with']})" if "ends_with" in row else ""  # not for want of memory
        if not row["tokens"]:
            return f"< {BLOCK:,}"  # the shortest row that is tried
        return f"{'>= ' if row.get('at_least') else ''}{row['tokens']:,}{ends}"
    micros = 1000 * row["ms"] / row["timed"]
    eager = next((e["ms"] for e in rows if e["contender"] == EAGER and _is_same(e, row)), None)
    return f"{micros:.1f}" + (f" ({row['ms'] / eager:.2f} of eager)" if eager else "")


def _is_same(eager: dict, row: dict) -> bool:
    same = ("model", "timed", "run")
    return "ms" in eager and all(eager.get(field) == row.get(field) for field in same)


def check_cells(rows: list[dict]) -> list[list[str]]:
    """Return a line a result of ``long_row_check``; the first line is the heading."""
    cells = [["tokens", "compared", "liger_patch's error", "eager's error", "holds"]]
    for row in rows:
        if "error" in row:
            numbers = [f"{row['error']:.3%}", f"{row['eager_error']:.3%}"]
        else:
            numbers = [f"{row['seconds']:.0f} s", ""]
            if "peak_mib" in row:
                numbers[0] += f", {row['peak_mib'] / 1024:.1f} GiB"
        cells.append([f"{row['tokens']:,}", row["what"], *numbers, "yes" if row["holds"] else "NO"])
    return cells


def terminal_check_table(rows: list[dict]) -> str:
    """Format the results of ``long_row_check`` for the terminal."""
    return _aligned(check_cells(rows))


def _aligned(cells: list[list[str]]) -> str:
    widths = [max(len(line[i]) for line in cells) + 2 for i in range(len(cells[0]))]
    return "\n".join(
        "".join(f"{cell:{width}s}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )
