"""The benchmarks of heads and of layer kernels, but for their times: what they measure, and how."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from slow_cases import slow_but

from benchmarks import batches_of_calls, layer_kernels
from benchmarks.head_contenders import eager, ours
from benchmarks.heads import Head
from benchmarks.kinds_of_heads import KINDS as KINDS_OF_HEADS
from benchmarks.kinds_of_heads import Kind, run_kind
from benchmarks.layer_cases import CASES, Case, Gate, Norm
from benchmarks.linear_cross_entropy import gradient_errors, run_case
from benchmarks.log_probs import contenders as log_probs_contenders
from benchmarks.measure import Failure, is_right
from benchmarks.names import COPY, LOWER_BOUND

TINY = Head("tiny", 16, 64, 40, ignored=0.3)


def raising(*_) -> torch.Tensor:
    raise ValueError("weight is too long\nand a second line")


def wrong(hidden_states, weight, labels) -> torch.Tensor:
    return 1.1 * eager(TINY)(hidden_states, weight, labels)


@pytest.mark.parametrize("kind", KINDS_OF_HEADS, ids=lambda kind: kind.name)
def test_every_kind_of_head_is_compared_with_eager_and_measured(kind: Kind):
    small = replace(TINY, frozen=True, hidden_size=64)
    rows = run_kind(replace(kind, head=small), rounds=1, device="cpu")
    assert [row["contender"] for row in rows] == [LOWER_BOUND, "eager", "liger_patch"]
    assert all(row["ms"] > 0 for row in rows)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("frozen", [False, True])
def test_log_probabilities_are_compared_with_eager_and_measured(
    frozen: bool, softcap: float, weighted: bool
):
    head = replace(TINY, frozen=frozen, softcap=softcap)
    rows = run_case(head, log_probs_contenders(head, weighted=weighted), rounds=1, device="cpu")
    of_gpus = "Liger-Kernel", "verl"  # none of these here, but for verl's plain one
    rows = [row for row in rows if not row["contender"].startswith(of_gpus)]
    names = [LOWER_BOUND, "eager", *(["TRL"] if find_spec("trl") else []), "liger_patch"]
    names += ["liger_patch, row_weights"] if weighted else []
    assert [row["contender"] for row in rows] == names
    assert all(row["ms"] > 0 for row in rows)


@pytest.mark.parametrize("head", [TINY, replace(TINY, softcap=5.0), replace(TINY, frozen=True)])
def test_the_check_passes_what_is_right_and_nothing_else(head: Head):
    losses = {"eager": eager(head), "liger_patch": ours(head), "wrong": wrong, "fails": raising}
    errors = gradient_errors(head, losses, device="cpu")
    assert {name for name in losses if is_right(errors[name], errors["eager"])} == {
        "eager",
        "liger_patch",
    }
    assert len(errors["eager"]) == (1 if head.frozen else 2)
    assert isinstance(errors["fails"], Failure)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DIRECTIONS = ("forward", "backward")


def tiny(case: Case) -> Case:
    if isinstance(case, Norm):
        return replace(case, rows=6, hidden_size=24)
    if isinstance(case, Gate):
        return replace(case, tokens=5, size=24)
    turned = None if case.turned is None else 8
    return replace(case, batch=2, heads=3, key_heads=2, tokens=5, size=16, turned=turned)


LAYERS = [tiny(case) for case in CASES]
ids = [case.name for case in CASES]
OF_EACH_KIND = list({type(case): case for case in LAYERS}.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", slow_but(OF_EACH_KIND, LAYERS), ids=ids)
def test_every_layer_is_compared_with_eager_and_measured(
    case: Case, device: str, monkeypatch: pytest.MonkeyPatch
):
    # whatever else this machine does at the moment
    monkeypatch.setattr(batches_of_calls, "MOST_QUEUEING_MS", math.inf)
    functions = layer_kernels.contenders(case)
    if device == "cpu":
        functions.pop("Liger-Kernel", None)
    rows = layer_kernels.run_case(case, functions, rounds=1, device=device)
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
