"""The benchmarks of heads, but for their times: what they measure, and how."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from benchmarks.head_contenders import eager, ours
from benchmarks.heads import Head
from benchmarks.kinds_of_heads import KINDS as KINDS_OF_HEADS
from benchmarks.kinds_of_heads import Kind, run_kind
from benchmarks.linear_cross_entropy import gradient_errors, run_case
from benchmarks.log_probs import contenders as log_probs_contenders
from benchmarks.measure import Failure, is_right
from benchmarks.names import LOWER_BOUND

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
