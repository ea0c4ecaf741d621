"""Tables and pictures of reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.head_tables import (
    idle_table,
    layer_kernels_table,
    other_gpus_table,
    quack_table,
    readme_table,
    sweep_table,
)
from benchmarks.names import COPY, LOWER_BOUND, by_default
from benchmarks.picture import draw_all
from benchmarks.report import RESULTS, read
from benchmarks.step_tables import steps_table, summary_table
from benchmarks.terminal import (
    terminal_layer_kernels_table,
    terminal_steps_table,
    terminal_table,
)

MEASURED = {
    "command": "python -m benchmarks name",
    "date": "2026-01-01",
    "gpu": "GPU",
    "versions": {"torch": "2.6", "triton": "3.2"},
}
OTHERS = "liger_patch, other GPUs"
TIMED = {"ms": 2.0, "host_ms": 1.0, "peak_mib": 512.0, "floor_over_time": 0.5}
OUTCOMES = {  # by contender
    LOWER_BOUND: TIMED,
    "eager": TIMED | {"gradient_errors": [0.002, 0.001]},
    "TRL": {"failure": "out of memory"},
    "QuACK": {"failure": "does not run: ValueError: no"},
    "CCE": {"wrong": True, "gradient_errors": [0.02, 0.25]},
}
HEAD = [{"case": "head", "tokens": 512, "contender": n, **row} for n, row in OUTCOMES.items()]
STEP = [
    {"model": "model", "contender": n, "loss": 1.0, "gradient_norm": 2.0, **row}
    for n, row in OUTCOMES.items()
]


def test_liger_patch_is_the_default_in_tables_of_whole_models():
    names = {
        "eager": "eager",
        "liger_patch": "liger_patch, layers=False",
        "liger_patch, layers": "liger_patch",
        "liger_patch, layers, with masks": "liger_patch, with masks",
    }
    report = {key: [{"contender": name} for name in names] for key in ("steps", "results")}
    shown = by_default(report)
    assert [row["contender"] for row in shown["steps"]] == list(names.values())
    assert shown["results"] == report["results"]


def test_tables_name_every_outcome():
    table = readme_table({**MEASURED, "results": HEAD})
    cells = "2.0 | 2.0 / 0.5 | out of memory | does not run | gradient off by 25.0%"
    assert f"| head, 512 tokens | {cells} |" in table
    assert "Measured on one GPU on 2026-01-01 in bf16 with torch 2.6, triton 3.2" in table
    assert "`python -m benchmarks name`" in table
    assert table.splitlines()[:3] == sweep_table({**MEASURED, "sweep": HEAD}).splitlines()[:3]
    assert f"| model | {cells} |" in steps_table({**MEASURED, "steps": STEP})
    for said in (terminal_table(HEAD), terminal_steps_table(STEP)):
        for words in (*OUTCOMES, "does not run: ValueError: no", "out of memory", "wrong"):
            assert words in said


def test_the_summary_has_times_of_the_first_report_and_torch_compile_of_the_second():
    def steps(**times: float) -> dict:
        rows = [
            {"model": "model", "contender": name, **TIMED, "ms": ms} for name, ms in times.items()
        ]
        return {**MEASURED, "steps": rows}

    ours = "liger_patch, layers"
    first = steps(**{"eager": 4.0, "Liger, all kernels": 3.0, ours: 1.0})
    second = steps(**{"eager": 4.4, "torch.compile": 2.5, ours: 1.2})
    cells = "| model | 4.0 / 0.5 | 2.5 / 0.5 | 3.0 / 0.5 | 1.0 / 0.5 |"
    table = summary_table(first, second)
    assert cells in table
    assert "took up to 20 % longer" in table
    second["steps"][0] = {"model": "model", "contender": "eager", "failure": "out of memory"}
    assert cells in summary_table(first, second)


def test_an_idle_gpu_has_the_fastest_peer_of_each_head():
    ours = {"contender": "liger_patch", **TIMED, "ms": 1.5}
    peers = [{"contender": name, **TIMED, "ms": ms} for name, ms in (("A", 4.0), ("B", 3.0))]
    others = {"contender": OTHERS, **TIMED}
    budget = {"contender": "liger_patch 128 MiB", **TIMED, "ms": 0.5}
    named = {"case": "head", "tokens": 512}
    rows = [*HEAD, *({**named, **row} for row in (*peers, ours, budget, others))]
    lonely = [{**row, "case": "lonely"} for row in HEAD]
    runs = {"idle": {"command": "c", "date": "2026-01-02", "versions": {"trl": "1"}}}
    table = idle_table({**MEASURED, "runs": runs, "idle": rows + lonely})
    head, _, first, second, _, note = table.splitlines()
    assert head.endswith(f"{LOWER_BOUND} | eager | fastest peer | liger_patch | {OTHERS} |")
    assert first.endswith(
        "| 2.00 (1.00) | 2.00 (1.00) | B: 3.00 (1.00) | 1.50 (1.00) | 2.00 (1.00) |"
    )
    assert second.endswith("| 2.00 (1.00) | 2.00 (1.00) |  |  |  |")
    assert "on 2026-01-02 in bf16 with trl 1: " in note
    assert "`c`" in note


def test_quack_stands_beside_what_ran_with_it():
    named = {"case": "head", "tokens": 512}
    more = ("QuACK, base", "TRL", "liger_patch", "liger_patch 128 MiB")
    rows = [*HEAD, *({**named, "contender": name, **TIMED} for name in more)]
    runs = {"quack": {"command": "c", "date": "2026-01-02", "versions": {"quack-kernels": "1"}}}
    table = quack_table({**MEASURED, "runs": runs, "quack": rows})
    head, *_, note = table.splitlines()
    assert head.endswith(f"{LOWER_BOUND} | eager | QuACK | QuACK, base | liger_patch |")
    assert "on 2026-01-02 in bf16 with quack-kernels 1: " in note


def test_kernels_of_other_gpus_have_the_bound_over_their_time():
    rows = [*HEAD, {"case": "head", "tokens": 512, "contender": OTHERS, **TIMED}]
    table = other_gpus_table({**MEASURED, "other_gpus": rows})
    cells = table.splitlines()[2].split(" | ")
    assert cells[1:4] == ["2.0", "2.0 / 0.5 (0.50)", "out of memory"]
    assert cells[-1] == "2.0 / 0.5 (0.50) |"


def test_a_cell_of_a_layer_has_both_directions():
    timed = {"ms": 0.0344, "host_ms": 0.1, "tb_per_s": 3.9, "share": 0.912}
    late = {"failure": "not timed: it takes 16 ms to queue 4 calls"}
    forward = {
        COPY: timed,
        "eager": {"wrong": True, "errors": [0.1]},
        "Liger-Kernel": timed,
        "liger_patch": timed,
    }
    backward = forward | {COPY: timed | {"tb_per_s": 4.123}, "Liger-Kernel": late}
    backward["liger_patch"] = timed | {"share": 0.876, "ms": 0.0506}
    rows = [
        {"case": "norm", "direction": direction, "contender": name, **row}
        for direction, outcomes in (("forward", forward), ("backward", backward))
        for name, row in outcomes.items()
    ]
    table = layer_kernels_table({**MEASURED, "layer_kernels": rows})
    assert "| norm | 3.90 / 4.12 | wrong | 0.91 / not timed | 0.91 / 0.88 (34 / 51) |" in table
    said = terminal_layer_kernels_table(rows)
    assert all(words in said for words in (late["failure"], "wrong", "10.000%", "backward"))


def test_old_reports_get_the_command_and_the_lower_bounds_name_of_today(tmp_path: Path):
    old = {"command": "python benchmarks/training_step.py --model 'A B'; python benchmarks/a.py"}
    old["steps"] = [{"model": "model", "contender": "bare products", "ms": 1.0}]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old), encoding="utf-8")
    report = read(path)
    command = "python -m benchmarks training_step --model 'A B'; python -m benchmarks a"
    assert report["command"] == command
    assert report["steps"][0]["contender"] == LOWER_BOUND


@pytest.mark.parametrize("name", ["linear_cross_entropy", "training_step", "convergence"])
def test_pictures_are_drawn_of_what_was_measured(name: str, tmp_path: Path):
    drawn = draw_all(read(RESULTS / f"{name}.json"), tmp_path / "report.json")
    assert len(drawn) == (2 if name == "linear_cross_entropy" else 1)
    assert all(path.stat().st_size > 10_000 for path in drawn)


def test_what_failed_is_not_drawn(tmp_path: Path):
    alone = {"model": "alone", "contender": LOWER_BOUND, "ms": 70.0}
    steps = draw_all({**MEASURED, "steps": [*STEP, alone]}, tmp_path / "steps.json")
    assert steps == [tmp_path / "steps.png"]
    failed = [row for row in HEAD if row["contender"] in (LOWER_BOUND, "TRL")]
    assert draw_all({**MEASURED, "results": failed}, tmp_path / "heads.json") == []
