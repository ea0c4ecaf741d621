"""The one entry of all benchmarks: names, options, and the report that is written."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from slow_cases import slow_but

from benchmarks.__main__ import BENCHMARKS, _options, main, run
from benchmarks.benchmark import Benchmark
from benchmarks.markdown import measured
from benchmarks.report import RESULTS, read, tables

ROWS = [{"case": "head", "contender": "eager", "ms": 1.0, "gradient_errors": [0.1, 0.2]}]

DRAWN = (  # how the names begin of reports that have a picture; one has two
    "convergence",
    "distributed_step",
    "linear_cross_entropy",
    "longest_row",
    "lora_step",
    "moe_step",
    "training_step",
)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def benchmark_of(*cases: Callable[[], Iterable[dict]], **fields) -> Benchmark:
    return Benchmark(("pytest", "no-such-package"), lambda _: {"rows": cases}, **fields)


def test_help_lists_every_benchmark(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(f"  {name} " in said and what in said for name, what in BENCHMARKS.items())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_has_help_without_a_gpu_and_needs_one_to_run(name: str, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    said = capsys.readouterr().out
    assert f"python -m benchmarks {name}" in said
    assert "--output" in said
    assert ("--rounds" in said) is not name.endswith(("convergence", "check", "soak"))
    with pytest.raises(SystemExit, match="benchmarks need a CUDA GPU"):
        main([name])


@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != "convergence"])
def test_every_benchmark_has_cases(name: str):
    module = import_module(f"benchmarks.{name}")
    lists = module.BENCHMARK.cases(_options(name, None, module.BENCHMARK, []))
    assert all(lists.values())


def test_the_report_is_written_after_every_case(a_gpu, tmp_path: Path):
    options = argparse.Namespace(rounds=3, output=tmp_path / "new")
    path = tmp_path / "new" / "tiny.json"

    def second() -> list[dict]:
        assert json.loads(path.read_text(encoding="utf-8"))["rows"] == ROWS
        return ROWS

    assert run("tiny", benchmark_of(lambda: ROWS, second, finish=lambda report: 7), options) == 7
    text = path.read_text(encoding="utf-8")
    lines = [line.rstrip(",") for line in text.splitlines() if '"case"' in line]
    assert [json.loads(line) for line in lines] == ROWS * 2  # a row is a line
    report = json.loads(text)
    assert report["rows"] == ROWS * 2
    assert report["command"] == "python -m benchmarks tiny --rounds 3"
    assert report["gpu"] == "a GPU"
    assert report["date"]
    assert list(report["versions"]) == ["python", "torch", "triton", "pytest"]


def test_no_case_of_a_name_is_said(a_gpu, tmp_path: Path):
    with pytest.raises(SystemExit, match="no case has such a name"):
        main(["training_step", "--model", "GPT-5", "--output", str(tmp_path)])


REPORTS = sorted(path.stem for path in RESULTS.glob("*.json"))


@pytest.mark.parametrize("name", slow_but(["linear_cross_entropy", "longest_row"], REPORTS))
def test_a_committed_report_is_shown_and_printed(name: str, tmp_path: Path, capsys):
    """With its pictures, and in the terminal with each contender, also one that has failed."""
    place = tmp_path / f"{name}.json"
    place.write_text((RESULTS / place.name).read_text(encoding="utf-8"), encoding="utf-8")
    assert main(["show", str(place)]) == 0
    report, shown = read(place), capsys.readouterr().out
    assert all(part in shown for part in (measured(report), *tables(report)))
    pictures = [path for path in tmp_path.iterdir() if path != place]
    assert all(f"wrote {each}" in shown and each.stat().st_size > 10_000 for each in pictures)
    assert len(pictures) == name.startswith(DRAWN) + (name == "linear_cross_entropy")
    rows = [row for key in report if isinstance(report[key], list) for row in report[key]]
    assert all(row["contender"] in shown for row in rows if not row.get("seed"))
    assert all(row["failure"].split(":")[0] in shown for row in rows if "failure" in row)
    assert "wrong" in shown or not any(row.get("wrong") for row in rows)
