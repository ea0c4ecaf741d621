"""The benchmark of layer kernels, but for its times: what it counts, checks, times and says."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from slow_cases import slow_but

from benchmarks import batches_of_calls
from benchmarks.layer_cases import CASES, Case, Gate, Norm
from benchmarks.layer_kernels import contenders, run_case
from benchmarks.names import COPY

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DIRECTIONS = ("forward", "backward")


def tiny(case: Case) -> Case:
    if isinstance(case, Norm):
        return replace(case, rows=6, hidden_size=24)
    if isinstance(case, Gate):
        return replace(case, tokens=5, size=24)
    turned = None if case.turned is None else 8
    return replace(case, batch=2, heads=3, key_heads=2, tokens=5, size=16, turned=turned)


TINY = [tiny(case) for case in CASES]
ids = [case.name for case in CASES]
OF_EACH_KIND = list({type(case): case for case in TINY}.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", slow_but(OF_EACH_KIND, TINY), ids=ids)
def test_every_case_is_compared_with_eager_and_measured(
    case: Case, device: str, monkeypatch: pytest.MonkeyPatch
):
    # whatever else this machine does at the moment
    monkeypatch.setattr(batches_of_calls, "MOST_QUEUEING_MS", math.inf)
    functions = contenders(case)
    if device == "cpu":
        functions.pop("Liger-Kernel", None)
    rows = run_case(case, functions, rounds=1, device=device)
    assert [(row["direction"], row["contender"]) for row in rows] == [
        (direction, name) for direction in DIRECTIONS for name in (COPY, *functions)
    ]
    for row in rows:
        assert min(row["ms"], row["host_ms"], row["tb_per_s"], row["share"]) > 0
        required = case.forward_bytes() if row["direction"] == "forward" else case.backward_bytes()
        assert row["bytes"] == required
        assert row["tb_per_s"] == pytest.approx(required / row["ms"] * 1000 / 10**12)
        if row["contender"] == COPY:
            assert row["share"] == 1
        else:
            assert 0 < max(row["errors"]) < 0.01
    assert json.loads(json.dumps(rows)) == rows
