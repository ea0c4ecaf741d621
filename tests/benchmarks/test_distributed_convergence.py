"""The benchmark of drift under engines, tiny, on the CPU: what it compares and what it notices."""

from __future__ import annotations

import math

import pytest

from benchmarks.distributed_convergence import TINY, finish, run_all
from benchmarks.distributed_tables import drift_table
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


def made_up(ours: float, *, fused: bool = True) -> list[dict]:
    """Eager under FSDP2 is 0.02 from one GPU, weights within rounding 0.01, and ours ``ours``."""

    def row(engine: str, name: str, off: float) -> dict:
        found = {"engine": engine, "contender": name, "training": [3 + off, 2 - off]}
        is_ours = name == OURS
        return found | {"patched": is_ours} | ({"fused": fused} if is_ours else {})

    rounded = [row(ALONE, ROUNDED, off) for off in (0.01, 0.004)]
    first = [row(ALONE, EAGER, 0.0), *rounded, row(ALONE, OURS, 0.0)]
    return [*first, row("FSDP2", EAGER, 0.02), row("FSDP2", OURS, ours)]


@pytest.mark.parametrize(
    ("ours", "fused", "says"),
    [
        (0.03, True, "as close as eager's"),
        (0.05, True, "FARTHER than eager's"),
        (math.nan, True, "FARTHER than eager's"),
        (0.0, False, "not fused"),
    ],
)
def test_a_run_farther_than_eagers_is_wrong(ours: float, fused: bool, says: str):
    rows = made_up(ours, fused=fused)
    assert str(verdicts(rows)[-1]) == says
    holds = says.startswith("as close")
    assert finish({"distributed_convergence": rows}) == (0 if holds else 1)
    assert says in terminal_drift_table(rows)


def test_the_table_has_every_engine():
    report = {"gpu": "GPU", "date": "2026-01-01", "versions": {"torch": "2.6"}, "command": "c"}
    report |= {"settings": {"steps": 2}, "distributed_convergence": made_up(0.03)}
    table = drift_table(report)
    assert "| one GPU | 0.0000 | 0.0100, 0.0040 | 0.0000 |" in table
    assert "| FSDP2 | 0.0200 |  | 0.0300 |" in table
    assert "FSDP2 as close as eager's" in table
