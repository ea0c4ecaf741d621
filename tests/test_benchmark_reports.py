"""What the benchmarks make of their results: tables and pictures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import picture
import pytest
import report as reporting
from attempts import Failure
from picture import draw_all
from report import (
    FLOOR,
    RESULTS,
    readme_table,
    steps_table,
    sweep_table,
    terminal_steps_table,
    terminal_table,
)


def measured(case: str, contender: str, ms: float, **fields) -> dict:
    row = {"case": case, "tokens": 512, "contender": contender}
    numbers = dict.fromkeys(("ms", "ms_low", "ms_high", "host_ms"), ms)
    numbers |= {"peak_mib": 512.0, "floor_over_time": 1 / ms}
    return row | numbers | fields


REPORT = {
    "command": "python benchmarks/linear_cross_entropy.py",
    "date": "2026-01-01",
    "gpu": "GPU",
    "versions": {"torch": "2.6", "triton": "3.2"},
    "results": [
        measured("head", FLOOR, 1.0, peak_mib=0.0),
        measured("head", "eager", 2.0, gradient_errors=[0.002, 0.001]),
        {"case": "head", "tokens": 512, "contender": "TRL", "failure": "out of memory"},
        {
            "case": "head",
            "tokens": 512,
            "contender": "QuACK",
            "failure": "does not run: ValueError: no",
        },
        {
            "case": "head",
            "tokens": 512,
            "contender": "CCE",
            "wrong": True,
            "gradient_errors": [0.02, 0.25],
        },
        measured("head", "liger_patch", 1.5, gradient_errors=[0.002, 0.001]),
    ],
    "sweep": [
        measured("head", contender, 1.5, tokens=tokens)
        for tokens in (512, 1024)
        for contender in (FLOOR, "eager", "liger_patch")
    ],
}
STEPS = {
    **{name: REPORT[name] for name in ("command", "date", "gpu", "versions")},
    "steps": [
        {"model": "model", "contender": FLOOR, "ms": 150.0, "host_ms": 9.0, "peak_mib": 4096.0},
        {"model": "model", "contender": "eager", "ms": 300.0, "host_ms": 90.0, "peak_mib": 2048.0},
        {"model": "model", "contender": "Liger", "failure": "out of memory"},
        {"model": "model", "contender": "other", "wrong": True, "loss": 1.0, "gradient_norm": 2.0},
        {"model": "model", "contender": "liger_patch", "ms": 200.0, "peak_mib": 1024.0},
        {"model": "other", "contender": FLOOR, "failure": "out of memory"},
        {
            "model": "other",
            "contender": "eager",
            "ms": 500.0,
            "host_ms": 90.0,
            "peak_mib": 2048.0,
            "loss": 1.0,
            "gradient_norm": 2.0,
        },
    ],
}


def test_tables_name_every_outcome():
    table = readme_table(REPORT)
    cells = "1.0 | 2.0 / 0.5 | out of memory | does not run | gradient off by 25.0% | 1.5 / 0.5"
    assert f"| head, 512 tokens | {cells} |" in table
    assert "| head, 1024 tokens | 1.5 | 1.5 / 0.5 | 1.5 / 0.5 |" in sweep_table(REPORT)
    assert "| model | 150.0 | 300.0 / 2.0 | out of memory | wrong | 200.0 / 1.0 |" in steps_table(
        STEPS
    )
    said = terminal_table(REPORT["results"])
    assert "does not run: ValueError: no" in said
    assert "wrong gradients" in said
    assert "0.200%, 0.100%" in said
    said = terminal_steps_table([row for row in STEPS["steps"] if row["model"] == "model"])
    assert "150.0" in said
    assert "out of memory" in said
    assert "wrong" in said


def test_tables_of_a_model_without_a_floor_say_why():
    rows = [row for row in STEPS["steps"] if row["model"] == "other"]
    assert "out of memory" in terminal_steps_table(rows)
    assert "| other | out of memory | 500.0 / 2.0 |" in steps_table(STEPS)


def test_the_tables_of_reports_are_printed(tmp_path, monkeypatch, capsys):
    reports = {"heads.json": REPORT, "steps.json": STEPS}
    for name, report in reports.items():
        (tmp_path / name).write_text(json.dumps(report), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["report.py", *(str(tmp_path / name) for name in reports)])
    reporting.main()
    tables = (readme_table(REPORT), sweep_table(REPORT), steps_table(STEPS))
    assert capsys.readouterr().out == "".join(f"{table}\n\n" for table in tables)


# kinds_of_heads, layer_kernels, log_probs and sft_step are tables alone
DRAWN = ("linear_cross_entropy", "training_step", "qlora_step", "convergence")


@pytest.mark.parametrize(
    "report",
    [
        REPORT,
        STEPS,
        *(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in DRAWN),
    ],
    ids=["heads", "models", *DRAWN],
)
def test_pictures_are_drawn_of_what_was_measured(report: dict, tmp_path: Path):
    drawn = draw_all(report, tmp_path / "report.json")
    parts = [key for key in ("results", "sweep", "steps", "convergence") if report.get(key)]
    assert len(set(drawn)) == len(parts) > 0
    assert all(path.stat().st_size > 10_000 for path in drawn)


@pytest.mark.parametrize("has_floor", [True, False])
def test_floors_of_steps_are_lines_beside_the_bars(has_floor, tmp_path, monkeypatch):
    """Also where a model has a floor and nothing else that ran."""
    alone = {"model": "alone", "contender": FLOOR, "ms": 70.0}
    rows = [row for row in (*STEPS["steps"], alone) if has_floor or row["contender"] != FLOOR]
    figures = []
    monkeypatch.setattr(picture, "_finish", lambda figure, *_: figures.append(figure))
    picture.draw_steps({**STEPS, "steps": rows}, tmp_path / "report.png")
    (figure,) = figures
    lines = [list(line.get_xdata()) for line in figure.axes[0].lines]
    assert lines == ([[150.0, 150.0]] if has_floor else [])


def test_nothing_is_drawn_where_nothing_ran(tmp_path: Path):
    failed = {"case": "head", "contender": "eager", **asdict(Failure("out of memory"))}
    report = {**REPORT, "results": [REPORT["results"][0], failed], "sweep": []}
    assert draw_all(report, tmp_path / "report.json") == []
