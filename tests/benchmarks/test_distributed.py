"""The benchmarks of several GPUs, tiny, on the CPU: every engine and contender runs, and drifts no
further than rounding does.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from benchmarks.distributed_contenders import ENGINES
from benchmarks.distributed_convergence import TINY, run_all
from benchmarks.distributed_step import TINY as TINY_STEP
from benchmarks.distributed_step import run_model
from benchmarks.distributed_tables import ALONE, ROUNDED, ROUNDINGS, terminal_drift_table, verdicts
from benchmarks.names import EAGER, OURS

pytestmark = pytest.mark.slow
DRIFTING = ("FSDP2", "ZeRO-3")
HOW = {"gpus": 2, "rounds": 1, "device": "cpu"}
needs = {"ZeRO-3": "deepspeed", "FSDP2": "accelerate"}


def test_every_engine_trains_as_one_process_does():
    pytest.importorskip("accelerate")
    pytest.importorskip("deepspeed")
    rows = run_all(TINY, ranks=2)
    found = [(row["engine"], row["contender"]) for row in rows]
    alone = [(ALONE, name) for name in (EAGER, *[ROUNDED] * ROUNDINGS, OURS)]
    assert found == [*alone, *((engine, name) for engine in DRIFTING for name in (EAGER, OURS))]
    wrappers = {row["engine"]: row["wrapper"] for row in rows}
    assert wrappers == {
        ALONE: "LlamaForCausalLM",
        "FSDP2": "FSDPLlamaForCausalLM",
        "ZeRO-3": "DeepSpeedEngine",
    }
    assert all(len(row["training"]) == TINY.steps for row in rows)
    assert [row["gpus"] for row in rows] == [1] * (2 + ROUNDINGS) + [2] * 4
    rounded = [row["training"] for row in rows if row["contender"] == ROUNDED]
    assert len(rounded) == ROUNDINGS
    assert len(set(map(tuple, rounded))) > 1  # in float32 some are the same
    assert rows[0]["training"][-1] < rows[0]["training"][0] - 0.01
    assert all(verdict.holds for verdict in verdicts(rows)), terminal_drift_table(rows)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_trains_in_two_processes(engine: str):
    if not find_spec(needs.get(engine, "torch")):
        pytest.skip(f"needs {needs[engine]}")
    eager, ours = run_model(TINY_STEP, engine, ["eager", "liger_patch"], **HOW)
    assert (eager["contender"], ours["contender"]) == ("eager", "liger_patch")
    for row in (eager, ours):
        assert "failure" not in row, row
        assert row["ms"] > 0
        assert row["model"] == f"tiny, {engine}, 2 GPUs"
        assert sum(each["calls"] for each in row["collectives"]) > 0
    assert ours["loss"] == pytest.approx(eager["loss"], rel=5e-3)
    assert not ours.get("wrong")
