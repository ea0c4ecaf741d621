"""The benchmark of steps on several GPUs, tiny, on the CPU: every engine and contender runs."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from failing_rank import run_out_of_memory

from benchmarks import distributed_step
from benchmarks.__main__ import main
from benchmarks.distributed_contenders import CONTENDERS, ENGINES, HEADS, ONE_SHARD, HeadRequest
from benchmarks.distributed_step import MODELS, TINY, TINY_HEAD, run_head, run_model
from benchmarks.distributed_tables import distributed_table
from benchmarks.measure import OUT_OF_MEMORY
from benchmarks.terminal import terminal_distributed_table

HOW = {"gpus": 2, "rounds": 1, "device": "cpu"}
needs = {"ZeRO-3": "deepspeed", "FSDP2": "accelerate"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_trains_in_two_processes(engine: str):
    if not find_spec(needs.get(engine, "torch")):
        pytest.skip(f"needs {needs[engine]}")
    eager, ours = run_model(TINY, engine, ["eager", "liger_patch"], **HOW)
    assert (eager["contender"], ours["contender"]) == ("eager", "liger_patch")
    for row in (eager, ours):
        assert "failure" not in row, row
        assert row["ms"] > 0
        assert row["model"] == f"tiny, {engine}, 2 GPUs"
        assert sum(each["calls"] for each in row["collectives"]) > 0
    assert ours["loss"] == pytest.approx(eager["loss"], rel=5e-3)
    assert not ours.get("wrong")


@pytest.mark.slow
def test_the_head_alone_is_measured_beside_its_bound():
    rows = {row["contender"]: row for row in run_head(TINY_HEAD, **HOW)}
    assert list(rows) == list(HEADS)
    assert not rows[ONE_SHARD]["collectives"]
    assert rows["loss_parallel"]["collectives"]
    has_shards = find_spec("liger_patch.kernels.vocab_shard") is not None
    if has_shards:
        same = pytest.approx(rows["loss_parallel"]["loss"], rel=1e-5)
        assert rows["liger_patch"]["loss"] == same
    else:
        assert "failure" in rows["liger_patch"]


@pytest.mark.slow
def test_a_rank_that_fails_does_not_wait_for_the_others():
    request = HeadRequest(TINY_HEAD, "loss_parallel", rounds=1, device="cpu")
    found = distributed_step._in_processes(run_out_of_memory, request, 2)
    assert found == {"failure": OUT_OF_MEMORY}


def made_up(monkeypatch: pytest.MonkeyPatch, *found: dict) -> list[dict]:
    rows = iter(found)
    monkeypatch.setattr(distributed_step, "_in_processes", lambda *_: next(rows))
    return run_model(TINY, "DDP", list(CONTENDERS), **HOW)


def test_tables_say_what_is_wrong_and_what_is_not_fused(monkeypatch: pytest.MonkeyPatch):
    timed = {"ms": 2.0, "peak_mib": 1024.0, "held_mib": 512.0, "collectives": []}
    sums = [{"kind": "allreduce", "mib": 2.0, "calls": 3}]
    rows = made_up(
        monkeypatch,
        timed | {"loss": 1.0, "collectives": sums},
        timed | {"loss": 1.5, "fused": True, "reason": None},
        timed | {"loss": 1.0, "fused": False, "reason": "it is freed"},
    )
    assert [row.get("wrong") for row in rows] == [None, True, None]
    said = terminal_distributed_table(rows)
    for words in ("3 allreduce 6", "wrong: loss 1.5", "NOT FUSED: it is freed"):
        assert words in said
    report = {"gpu": "GPU", "date": "2026-01-01", "versions": {"torch": "2.6"}, "command": "c"}
    table = distributed_table(report | {"distributed_steps": rows})
    assert "| tiny, DDP, 2 GPUs | 2.0 / 1.0 | wrong | not fused |" in table
    assert f"in all rows, except: {rows[1]['model']}, {rows[1]['contender']};" in table
    same = [row | {"collectives": sums} for row in rows]
    assert "as eager in all rows." in distributed_table(report | {"distributed_steps": same})
    eager, *ours = same
    failed = [{"model": eager["model"], "contender": "eager", "failure": OUT_OF_MEMORY}, *ours]
    table = distributed_table(report | {"distributed_steps": failed})
    assert "as eager in all rows in which eager ran." in table


def test_cases_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path):
    asked = []

    def run(model, engine, names, *, gpus, rounds, device):
        asked.append((model.name, engine, names, gpus))
        return [{"model": "m", "contender": "eager", "failure": "out of memory"}]

    monkeypatch.setattr(distributed_step, "run_model", run)
    options = ["--device", "cpu", "--gpus", "2", "--engine", "DDP", "--contender", "liger_patch"]
    assert main(["distributed_step", *options, "--output", str(tmp_path)]) == 0
    assert asked == [("tiny", "DDP", ["eager", "liger_patch"], 2)]
    assert [model.name for model in MODELS] == ["Llama-3.2-1B, 4 x 2048", "Qwen3-8B, 2 x 2048"]
