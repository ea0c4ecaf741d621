"""The benchmark of drift under engines, tiny, on the CPU: what it compares and what it notices."""

from __future__ import annotations

import pytest

from benchmarks.distributed_convergence import TINY, run_all
from benchmarks.drift_report import ALONE, ROUNDED, ROUNDINGS, terminal_drift_table, verdicts
from benchmarks.names import EAGER, OURS

ENGINES = ("FSDP2", "ZeRO-3")


@pytest.mark.slow
def test_every_engine_trains_as_one_process_does():
    pytest.importorskip("accelerate")
    pytest.importorskip("deepspeed")
    rows = run_all(TINY, ranks=2)
    found = [(row["engine"], row["contender"]) for row in rows]
    alone = [(ALONE, name) for name in (EAGER, *[ROUNDED] * ROUNDINGS, OURS)]
    assert found == [*alone, *((engine, name) for engine in ENGINES for name in (EAGER, OURS))]
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
