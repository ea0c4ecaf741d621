"""Longest rows of several runs in one report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.longest_report import longest_cells
from benchmarks.merge_rows import merged

NAME = {"model": "tiny, QLoRA", "contender": "eager", "whole_attention": 8}


def report_of(command: str, *rows: dict, **other: Any) -> dict:
    found = {"gpu": "GPU", "date": "2026-01-01", "versions": {"torch": "2.6"}, "command": command}
    return found | other | {"longest_rows": [{**NAME, **row} for row in rows]}


FIRST = report_of(
    "a",
    {"timed": 8, "ms": 2.0},
    {"gib": 24.0, "tokens": 8},
    {"gib": 48.0, "tokens": 16, "at_least": True},
    {"gib": 139.0, "failure": "takes longer than 9 s"},
)


def lengths(report: dict) -> dict[float, tuple[Any, ...]]:
    fields = "tokens", "at_least", "run"
    rows = [row for row in report["longest_rows"] if "gib" in row]
    return {row["gib"]: tuple(row.get(field) for field in fields) for row in rows}


def test_a_length_that_is_exact_or_longer_replaces_another() -> None:
    second = report_of(
        "b",
        {"timed": 8, "ms": 3.0},
        {"gib": 24.0, "tokens": 4, "at_least": True},
        {"gib": 48.0, "tokens": 16},
        {"gib": 80.0, "tokens": 24, "at_least": True},
        {"gib": 139.0, "tokens": 24, "at_least": True},
    )
    found = merged(FIRST, second)
    assert found["command"] == "a; b"
    assert lengths(found) == {
        24.0: (8, None, 1),
        48.0: (16, None, 2),
        80.0: (24, True, 2),
        139.0: (24, True, 2),
    }
    lines = [line[0] for line in longest_cells(found["longest_rows"])[1:]]
    timed = [f"tiny, QLoRA, 8 tokens, run {run}" for run in (1, 2)]
    assert lines == [*timed, *(f"tiny, QLoRA, {gib} GiB" for gib in (24, 48, 80, 139))]
    third = report_of(
        "c", {"gib": 80.0, "tokens": 32, "at_least": True}, {"gib": 24.0, "failure": "x"}
    )
    longer = 32, True, 3
    assert lengths(merged(found, third)) == lengths(found) | dict.fromkeys((80.0, 139.0), longer)


def test_a_row_that_fits_less_memory_fits_more() -> None:
    found = merged(FIRST, report_of("b", {"gib": 24.0, "tokens": 32}))
    assert lengths(found)[24.0] == (32, None, 2)
    assert lengths(found)[48.0] == (32, True, 2)


def test_a_report_is_written_anew_unless_the_runs_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of other days have their dates; another GPU or version is an error."""
    rows = [{"gib": 24.0, "tokens": 8}]
    more = {"torch": "2.6", "unsloth": "1"}  # not installed in the first run
    runs = [
        FIRST,
        report_of("b", *rows, versions=more),
        report_of("c", *rows, date="2026-01-02"),
        report_of("d", *rows, date="2026-01-03"),
    ]
    first, *others = (tmp_path / f"{run['command']}.json" for run in runs)
    for path, run in zip((first, *others), runs, strict=True):
        path.write_text(json.dumps(run), encoding="utf-8")
    assert main(["merge", *map(str, (first, *others))]) == 0
    found = json.loads(first.read_text(encoding="utf-8"))
    assert found["date"] == "2026-01-01 (run 3: 2026-01-02, run 4: 2026-01-03)"
    assert found["versions"] == more
    for refused, message in (
        (report_of("b", *rows, gpu="X"), "gpu must be that of the report, GPU, got X of 'b'"),
        (report_of("b", *rows, versions={"torch": "2.7"}), "torch must be that of the report, 2.6"),
        (report_of("b"), "a report must have longest_rows, got one of 'b'"),
    ):
        others[0].write_text(json.dumps(refused), encoding="utf-8")
        with pytest.raises(SystemExit, match="2"):
            main(["merge", str(first), str(others[0])])
        assert message in capsys.readouterr().err
    assert json.loads(first.read_text(encoding="utf-8")) == found
