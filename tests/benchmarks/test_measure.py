"""Measuring: failures in words, errors that are allowed, turns, and the load in front of them."""

from __future__ import annotations

import pytest
import torch

from benchmarks import measure as measuring
from benchmarks.batches_of_calls import Inputs, Slots, measure_batches
from benchmarks.measure import (
    Failure,
    Measurement,
    Unsupported,
    _deciles,
    attempt,
    is_right,
    measure,
)


def out_of_memory(*_) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024 GiB.")


def raising(*_) -> torch.Tensor:
    raise ValueError("weight is too long\nand a second line")


def test_failures_are_told_in_words():
    assert attempt(lambda: 3) == 3
    assert attempt(out_of_memory) == Failure("out of memory")
    assert attempt(raising) == Failure("does not run: ValueError: weight is too long")

    def unsupported():
        raise Unsupported("no softcap")

    assert attempt(unsupported) == Failure("does not run: no softcap")


@pytest.mark.parametrize("call", [4, 7], ids=["in its turn", "after its turns"])
def test_a_function_that_fails_between_others_has_no_more_turns(call: int):
    calls = []

    def fails_late():
        calls.append(1)
        if len(calls) == call:
            out_of_memory()

    results = measure({"late": fails_late, "fine": lambda: None}, rounds=3, device="cpu")
    assert results["late"] == Failure("out of memory")
    assert isinstance(results["fine"], Measurement)
    assert len(calls) == call


def test_a_gradient_of_nan_is_not_right():
    assert not is_right([0.001, float("nan")], [0.001, 0.001])
    assert not is_right([float("nan"), 0.001], [0.001, 0.001])


def test_large_errors_are_right_where_eager_has_them_too():
    assert is_right([0.05], [0.03])
    assert not is_right([0.05], [0.02])
    assert not is_right([0.05], Failure("out of memory"))


def test_deciles_of_few_times_are_the_least_and_the_greatest():
    assert _deciles([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert _deciles([float(i) for i in range(20, 0, -1)]) == (3.0, 18.0)


def test_a_short_load_runs_as_often_as_it_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measuring, "_ms", lambda function, kind: 9.0)
    assert measuring._times_to_last(lambda: None, 40.0, "cuda") == 5
    assert measuring._times_to_last(lambda: None, 5.0, "cuda") == 1
    monkeypatch.setattr(measuring, "_ms", lambda function, kind: 0.0)
    assert measuring._times_to_last(lambda: None, 40.0, "cuda") == measuring.MOST_LOADS


def test_the_load_is_as_long_as_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def times_to_last(function, ms: float, kind: str) -> int:
        asked.append(ms)
        return 2

    monkeypatch.setattr(measuring, "_times_to_last", times_to_last)
    loads = []
    calls = {"nothing": lambda: None}
    measure(calls, before=lambda: loads.append(1), rounds=2, device="cpu")
    assert len(loads) == 2 * 3  # the first turn is not timed
    measure(calls, before=lambda: None, load_ms=5.0, rounds=1, device="cpu")
    measure_batches(calls, Slots(Inputs((), (), ()), 1), rounds=1, device="cpu")
    assert asked == [measuring.LOAD_MS, 5.0, 20.0]
