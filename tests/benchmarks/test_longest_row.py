"""The benchmark of the longest rows: its contenders, and what it says of what they found."""

from __future__ import annotations

from pathlib import Path

import pytest
from row_searches import LORA, TINY

from benchmarks.longest_report import longest_cells, terminal_longest_table
from benchmarks.longest_row import Limits, run_case
from benchmarks.picture import draw_all
from benchmarks.step_tables import longest_rows_table

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning"
)


@pytest.mark.slow
def test_each_contender_has_a_process(capfd):
    limits = Limits(gib=(1.0,), step=16, most=32, timed=(16,), whole=16, rounds=1, seconds=300.0)
    found = list(run_case(TINY, [LORA], ("eager", "liger_patch"), limits, device="cpu"))
    assert [row["contender"] for row in found] == ["eager"] * 2 + ["liger_patch"] * 2
    assert [row["tokens"] for row in found if "gib" in row] == [32, 32]
    assert all(row["ms"] > 0 for row in found if "timed" in row)
    assert "tiny, LoRA + checkpointing: liger_patch ..." in capfd.readouterr().out


def made_up() -> list[dict]:
    name = {"model": "tiny, QLoRA", "whole_attention": 65536}
    eager, ours = ({**name, "contender": each} for each in ("eager", "liger_patch"))
    return [
        {**eager, "timed": 1000, "ms": 4.0},
        {**eager, "gib": 24.0, "tokens": 8192},
        {**eager, "gib": 48.0, "failure": "does not run"},
        {**ours, "timed": 1000, "ms": 3.0},
        {**ours, "gib": 24.0, "tokens": 122880, "at_least": True},
        {**ours, "gib": 48.0, "tokens": 163840, "ends_with": "RuntimeError: host memory"},
    ]


def test_tables_have_a_line_for_each_memory_and_length():
    head, timed, small, large = longest_cells(made_up())
    assert head[1:] == ["eager", "liger_patch"]
    assert timed == ["tiny, QLoRA, 1,000 tokens", "4.0 (1.00 of eager)", "3.0 (0.75 of eager)"]
    assert small == ["tiny, QLoRA, 24 GiB", "8,192", ">= 122,880"]
    assert large == ["tiny, QLoRA, 48 GiB", "does not run", "163,840 (RuntimeError: host memory)"]
    assert "0.75 of eager" in terminal_longest_table(made_up())
    report = {"gpu": "GPU", "date": "2026-01-01", "versions": {"torch": "2.6"}, "command": "c"}
    note = longest_rows_table(report | {"longest_rows": made_up()}).splitlines()[-1]
    assert note.endswith("Rows of more than 65,536 tokens attend within blocks of 8192.")


def test_a_picture_has_the_rows_that_were_found(tmp_path: Path):
    versions = {"torch": "2.6", "triton": "3.2"}
    report = {"gpu": "GPU", "date": "2026-01-01", "versions": versions, "command": "c"}
    partly = {**report, "longest_rows": made_up()}  # bounds, failures, no more than one point
    assert draw_all(partly, tmp_path / "longest_row.json") == [tmp_path / "longest_row.png"]
    assert (tmp_path / "longest_row.png").stat().st_size > 10_000
    several = [{**row, "model": name} for row in made_up() for name in ("a", "b", "c")]
    assert draw_all({**report, "longest_rows": several}, tmp_path / "several.json")
    nothing = [row for row in made_up() if "tokens" not in row]
    assert draw_all({**report, "longest_rows": nothing}, tmp_path / "longest_row.json") == []
