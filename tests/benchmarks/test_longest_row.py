"""The benchmark of the longest rows: its contenders, and what it says of what they found."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from row_searches import LORA, QLORA, SEARCH, TINY
from transformers import AutoModelForCausalLM

from benchmarks import longest_row
from benchmarks.__main__ import main
from benchmarks.longest_report import attention_note, longest_cells, terminal_longest_table
from benchmarks.longest_row import MODELS, Limits, run_case, summary
from benchmarks.lora_contenders import OFFLOADED, Setting
from benchmarks.lora_step import run_process
from benchmarks.models import Model
from benchmarks.picture import draw_all
from benchmarks.row_estimate import estimated_longest
from benchmarks.step_tables import longest_rows_table, longest_summary

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing_enable. is deprecated:FutureWarning"
)


def test_models_have_the_sizes_of_their_names():
    for model, billions in zip(MODELS, (8.03, 8.19), strict=True):
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
        assert sum(p.numel() for p in built.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)
        assert model.config.max_position_embeddings >= longest_row.MOST


def test_a_row_that_fits_less_memory_is_a_lower_bound():
    search = replace(SEARCH, timed=(64,), limits=(1.0, 2.0, 3.0, 4.0))
    steps = [
        {"timed": 64, "tokens": 64, "ms": 1.0, "reserved_mib": 2500.0},
        {"gib": 1.0, "tokens": 8, "reserved_mib": 900.0},
        {"gib": 1.0, "tokens": 16, "failure": "out of memory"},
    ]
    lines = list(summary(search, steps, "takes longer than 5 s", 8))[1:]
    assert [(row["tokens"], row.get("at_least", False)) for row in lines] == [
        (8, False),
        (8, True),
        (64, True),
        (64, True),
    ]


def test_processes_share_the_time_that_is_left():
    assert Limits().seconds_left(10.0, 2) is None
    assert Limits(seconds=30.0).seconds_left(100.0, 2) == 30.0
    assert Limits(total=100.0).seconds_left(40.0, 3) == 20.0
    assert Limits(total=100.0, seconds=15.0).seconds_left(40.0, 3) == 15.0
    assert Limits(total=100.0).seconds_left(101.0, 1) == 0.0


def test_a_process_that_is_ended_leaves_its_rows():
    made_up = (
        "import sys, time, types\n"
        "def main(request, results):\n"
        "    results.write_text('{\"tokens\": 8}\\n')\n"
        "    time.sleep(600)\n"
        "sys.modules['benchmarks.made_up'] = types.SimpleNamespace(main=main)\n"
    )
    found: list[dict] = []
    failure = run_process("made_up", "", made_up, 2.0, found)
    assert found == [{"tokens": 8}]
    assert failure == "takes longer than 2 s"


SLEEPER = """import os, signal, sys, time, types
def main(request, results):
    results.write_text('{"gib": 1.0, "tokens": 8}\\n')
    if '"liger_patch"' in request.read_text():  # the second contender
        os.kill(os.getppid(), signal.SIGUSR1)
    time.sleep(600)
sys.modules["benchmarks.row_search"] = types.SimpleNamespace(main=main)
blocks = types.SimpleNamespace(install=lambda tokens: None)
sys.modules["benchmarks.attention_blocks"] = blocks
"""


def test_a_signal_leaves_the_rows_of_all_contenders(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(longest_row, "ALLOCATOR", SLEEPER)
    monkeypatch.setattr(longest_row, "save", lambda *_: None)
    before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit("ended"))
    limits, found = Limits(gib=(1.0, 2.0), timed=(16,), seconds=2.0), []

    def collect() -> None:
        for row in run_case(TINY, [LORA], ("eager", "liger_patch", "Unsloth"), limits):
            found.append(row)

    try:
        with pytest.raises(SystemExit, match="ended"):
            collect()
    finally:
        signal.signal(signal.SIGUSR1, before)
    late, ended = "takes longer than 2 s", "not reached: ended"
    assert [(row["contender"], row.get("tokens"), row.get("failure")) for row in found] == [
        ("eager", None, late),
        ("eager", 8, None),
        ("eager", 8, None),
        ("liger_patch", None, ended),
        ("liger_patch", 8, None),
        ("liger_patch", 8, None),
    ]
    assert all(row["at_least"] for row in found if "tokens" in row)


def test_a_search_that_ends_early_has_a_lower_bound():
    named = {"model": "tiny, LoRA + checkpointing", "contender": "eager"}
    steps = [
        {**named, "timed": 16, "ms": 2.0, "peak_mib": 1.0},
        {**named, "gib": 1.0, "tokens": 8},
        {**named, "gib": 1.0, "tokens": 16},
        {**named, "gib": 1.0, "tokens": 32, "failure": "out of memory"},
    ]
    timed, cut, untried = summary(SEARCH, steps, "takes longer than 1 s", 8)
    assert timed["ms"] == 2.0
    assert (cut["tokens"], cut["at_least"]) == (16, True)
    assert (untried["tokens"], untried["at_least"]) == (16, True)
    nothing = list(summary(SEARCH, [], "does not run", 8))
    assert [row["failure"] for row in nothing] == ["does not run"] * 3


@pytest.mark.slow
def test_estimates_are_made_beside_the_search(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple] = []

    def run_process(module: str, request: str, *_) -> str:
        asked.append(tuple(map(tuple, json.loads(request)["guesses"])))
        return ""

    monkeypatch.setattr(longest_row, "save", lambda *_: None)
    monkeypatch.setattr(longest_row, "run_process", run_process)
    limits = Limits(gib=(1.0, 2.0), timed=(), estimated=True)
    list(run_case(TINY, [LORA], ("Unsloth", "liger_patch"), limits))
    unsloth, ours = asked
    assert unsloth == ()
    assert ours == tuple(
        estimated_longest(TINY.config, "liger_patch", LORA, [1.0, 2.0], None, 1).items()
    )


@pytest.mark.slow
def test_each_contender_has_a_process(capfd):
    limits = Limits(gib=(1.0,), step=16, most=32, timed=(16,), whole=16, rounds=1, seconds=300.0)
    found = list(run_case(TINY, [LORA], ("eager", "liger_patch"), limits, device="cpu"))
    assert [row["contender"] for row in found] == ["eager"] * 2 + ["liger_patch"] * 2
    assert [row["tokens"] for row in found if "gib" in row] == [32, 32]
    assert all(row["ms"] > 0 for row in found if "timed" in row)
    assert "tiny, LoRA + checkpointing: liger_patch ..." in capfd.readouterr().out


def test_a_model_that_cannot_be_saved_is_the_failure_of_all(monkeypatch: pytest.MonkeyPatch):
    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(longest_row, "save", full)
    found = list(run_case(TINY, [LORA], ("eager", "Unsloth"), Limits(), device="cpu"))
    assert {row["failure"] for row in found} == {"does not run: OSError: disk full"}


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


def test_rows_with_inputs_that_are_computed_again_say_so():
    steps = [{"timed": 16, "ms": 3.2}, {"gib": 1.0, "tokens": 8}]
    search = replace(SEARCH, contender=OFFLOADED, every=2)
    found = list(summary(search, steps, "", 8))
    assert [row["every"] for row in found] == [2, 2, 2]
    _, timed, small, _ = longest_cells(found)
    assert timed[1] == "200.0 (checkpoint_every=2)"
    assert small[1] == ">= 8 (checkpoint_every=2)"
    (other, *_) = summary(replace(search, contender="eager"), steps, "", 8)
    assert "every" not in other


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


def test_a_sentence_has_every_contender_in_the_least_memory():
    said = longest_summary({"longest_rows": made_up()})
    found = "The longest row of tiny, QLoRA in 24 GiB, in tokens: eager 8,192; liger_patch at least"
    assert said.startswith(f"{found} 122,880: [all lengths")
    assert "(docs/memory.md#the-longest-row)" in said
    assert said.endswith("An arrow in the picture is a lower bound.")
    exact = [{**row, "at_least": False} for row in made_up()]
    assert "arrow" not in longest_summary({"longest_rows": exact})


def test_times_of_two_runs_are_on_two_lines():
    rows = [{**row, "run": 1 + (row["contender"] == "liger_patch")} for row in made_up()]
    _, first, second, small, _ = longest_cells(rows)
    assert first == ["tiny, QLoRA, 1,000 tokens, run 1", "4.0 (1.00 of eager)", ""]
    assert second == ["tiny, QLoRA, 1,000 tokens, run 2", "", "3.0"]  # no eager in that run
    assert small == ["tiny, QLoRA, 24 GiB", "8,192", ">= 122,880"]
    report = {"gpu": "GPU", "date": "2026-01-02 (run 2: 2026-01-03)", "versions": {"torch": "2.6"}}
    report |= {"command": "a --timed; b", "longest_rows": rows}
    table = longest_rows_table(report)
    assert "on 2026-01-02 to 2026-01-03" in table
    assert "`python -m benchmarks longest_row`. Rows" in table
    assert "The command of each run is in `benchmarks/results/longest_row.json`" in table


def test_a_note_names_the_runs_whose_attention_is_in_blocks_of_other_rows():
    eager, *others = ({**row, "run": 1} for row in made_up())
    runs = [eager, *({**row, "run": 2, "whole_attention": 16384} for row in others)]
    assert attention_note(runs) == (
        "Rows of more than 65,536 tokens attend within blocks of 8192; "
        "in run 2, those of more than 16,384."
    )


def test_a_row_that_is_shorter_than_any_that_was_tried_is_less_than_that():
    rows = [{**row, "tokens": 0} for row in made_up() if "tokens" in row and "ends_with" not in row]
    _, line = longest_cells(rows)
    assert line[1:] == ["< 8,192", "< 8,192"]


def test_rows_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    measured = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    def measure(model: Model, settings: list[Setting], contenders: list[str], limits: Limits):
        measured.append((model.name, [each.name for each in settings], contenders, limits))
        return made_up()

    monkeypatch.setattr(longest_row, "run_case", measure)
    options = ["--model", "Llama-3.1-8B, QLoRA", "--contender", "liger_patch", "--gib", "24"]
    options += ["--limit", "9", "--timed", "64", "--whole-attention", "32", "--rounds", "1"]
    assert main(["longest_row", *options, "--output", str(tmp_path)]) == 0
    limits = Limits(gib=[24.0], timed=[64], whole=32, rounds=1, seconds=9.0)
    assert measured == [("Llama-3.1-8B", [QLORA.name], ["liger_patch"], limits)]
    options = ["--try", "24:16384", "--try", "48:40960", "--host-gib", "120", "--rounds", "1"]
    options += ["--total", "540", "--checkpoint-every", "2"]
    assert main(["longest_row", *options, "--output", str(tmp_path)]) == 0
    tries = ((24.0, 16384), (48.0, 40960))
    limits = Limits(gib=[24.0, 48.0], timed=(), rounds=1, tries=tries, host_gib=120.0, total=540.0)
    limits = replace(limits, every=2)
    assert measured[-1][-1] == limits
    assert main(["longest_row", "--estimated", "--output", str(tmp_path)]) == 0
    assert measured[-1][-1] == Limits(timed=(), estimated=True)
    assert [(each[0], each[1]) for each in measured[-2:]] == [
        (name, [LORA.name, QLORA.name]) for name in ("Llama-3.1-8B", "Qwen3-8B")
    ]
    assert main(["longest_row", *options, "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "longest_row.json").read_text(encoding="utf-8"))
    assert "--try 24:16384 --try 48:40960" in report["command"]


@pytest.mark.parametrize("text", ["24", "24:", "24:x", "x:8192", "24:9000", "24:0"])
def test_lengths_that_are_tried_are_checked(text: str, capsys):
    with pytest.raises(SystemExit):
        main(["longest_row", "--try", text])
    assert "--try" in capsys.readouterr().err
