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


def test_runs_of_other_days_have_their_dates() -> None:
    rows = [{"gib": 24.0, "tokens": 8}]
    same = merged(FIRST, report_of("b", *rows))
    assert same["date"] == "2026-01-01"
    later = merged(same, report_of("c", *rows, date="2026-01-02"))
    assert later["date"] == "2026-01-01 (run 3: 2026-01-02)"
    latest = merged(later, report_of("d", *rows, date="2026-01-03"))
    assert latest["date"] == "2026-01-01 (run 3: 2026-01-02, run 4: 2026-01-03)"


def test_other_gpus_and_versions_are_refused() -> None:
    rows = [{"gib": 24.0, "tokens": 8}]
    with pytest.raises(ValueError, match="gpu must be that of the report, GPU, got another of 'b'"):
        merged(FIRST, report_of("b", *rows, gpu="another"))
    with pytest.raises(ValueError, match=r"torch must be that of the report, 2\.6, got 2\.7"):
        merged(FIRST, report_of("b", *rows, versions={"torch": "2.7"}))
    more = {"torch": "2.6", "unsloth": "1"}  # not installed in the first run
    assert merged(FIRST, report_of("b", *rows, versions=more))["versions"] == more
    with pytest.raises(ValueError, match="a report must have longest_rows, got one of 'b'"):
        merged(FIRST, report_of("b"))


def test_a_report_is_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps(FIRST), encoding="utf-8")
    second.write_text(json.dumps(report_of("b", {"gib": 80.0, "tokens": 24})), encoding="utf-8")
    assert main(["merge", str(first), str(second)]) == 0
    assert lengths(json.loads(first.read_text(encoding="utf-8")))[80.0] == (24, None, 2)
    before = first.read_text(encoding="utf-8")
    second.write_text(json.dumps(report_of("b", {"gib": 80.0}, gpu="another")), encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        main(["merge", str(first), str(second)])
    assert "gpu must be that of the report" in capsys.readouterr().err
    assert first.read_text(encoding="utf-8") == before
