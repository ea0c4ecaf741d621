"""The benchmark of steps on several GPUs, tiny, on the CPU: every engine and contender runs."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from benchmarks.distributed_contenders import ENGINES
from benchmarks.distributed_step import TINY, run_model

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
