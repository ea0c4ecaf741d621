"""The benchmarks of heads, but for their times: what they measure, and how."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from benchmarks import head_contenders, linear_cross_entropy
from benchmarks.head_contenders import (
    BUDGETS_MIB,
    BUDGETS_OF_OTHERS_MIB,
    OTHER_GPUS,
    OURS,
    contenders,
    eager,
    ours,
    step,
    sweep_contenders,
)
from benchmarks.head_tables import idle_table
from benchmarks.heads import HEADS, IGNORE_INDEX, SWEEP, SWEEP_TOKENS, Head, batch
from benchmarks.kinds_of_heads import KINDS as KINDS_OF_HEADS
from benchmarks.kinds_of_heads import Kind, run_kind
from benchmarks.linear_cross_entropy import TOKENS, gradient_errors, run_case
from benchmarks.log_probs import CASES
from benchmarks.log_probs import contenders as log_probs_contenders
from benchmarks.measure import (
    Failure,
    Unsupported,
    is_right,
)
from benchmarks.names import LOWER_BOUND, OF_HOPPER

TINY = Head("tiny", 16, 64, 40, ignored=0.3)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def raising(*_) -> torch.Tensor:
    raise ValueError("weight is too long\nand a second line")


def wrong(hidden_states, weight, labels) -> torch.Tensor:
    return 1.1 * eager(TINY)(hidden_states, weight, labels)


def test_cases_have_names_of_their_own():
    names = {head.name for head in HEADS}
    assert len(names) == len(HEADS)
    assert names >= set(CASES)


def test_cases_are_heads_that_can_be_trained():
    for head in (*HEADS, *SWEEP):
        assert min(head.hidden_size, head.vocab_size, head.tokens) > 0, head
        assert 0 <= head.ignored < 1, head
        assert 0 <= head.mistaken < 1, head
        assert head.softcap is None or head.softcap > 0, head
        assert (head.tokens % 8, head.vocab_size % 8) == (0, 0), f"QuACK cannot take {head}"


def test_the_sweep_varies_only_the_tokens():
    heads = {head.name: head for head in HEADS}
    names = {head.name for head in SWEEP}
    assert names == {"Llama-3-8B", "Gemma-3-270M"}
    assert {(head.name, head.tokens) for head in SWEEP} == {
        (name, tokens) for name in names for tokens in SWEEP_TOKENS
    }
    assert all(head == replace(heads[head.name], tokens=head.tokens) for head in SWEEP)


def test_the_check_is_on_a_number_of_tokens_whose_inverse_is_rounded():
    assert TOKENS & (TOKENS - 1) != 0
    assert TOKENS % 8 == 0, "QuACK asks for it"


@pytest.mark.parametrize("kind", KINDS_OF_HEADS, ids=lambda kind: kind.name)
def test_every_kind_of_head_is_compared_with_eager_and_measured(kind: Kind):
    if kind.quantized:
        pytest.importorskip("bitsandbytes")
    small = replace(TINY, frozen=True, hidden_size=64)
    rows = run_kind(replace(kind, head=small), rounds=1, device="cpu")
    assert [row["contender"] for row in rows] == [LOWER_BOUND, "eager", "liger_patch"]
    assert all(row["ms"] > 0 for row in rows)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("frozen", [False, True])
def test_log_probabilities_are_compared_with_eager_and_measured(frozen: bool, softcap: float):
    head = replace(TINY, frozen=frozen, softcap=softcap)
    rows = run_case(head, log_probs_contenders(head), rounds=1, device="cpu")
    names = [LOWER_BOUND, "eager", *(["TRL"] if find_spec("trl") else []), "liger_patch"]
    assert [row["contender"] for row in rows] == names
    assert all(row["ms"] > 0 for row in rows)


def test_a_batch_plants_the_labels():
    head = replace(TINY, tokens=400, hidden_size=256, peak=40.0, mistaken=0.25)
    hidden_states, weight, labels = batch(head, device="cpu")
    assert hidden_states.shape == (400, 256)
    assert weight.shape == (64, 256)
    assert hidden_states.dtype == weight.dtype == torch.bfloat16
    assert hidden_states.requires_grad
    assert weight.requires_grad
    supervised = labels != IGNORE_INDEX
    assert supervised.float().mean().item() == pytest.approx(0.7, abs=0.1)
    logits = (hidden_states @ weight.t()).float()
    certain = supervised & (logits.softmax(-1).amax(-1) > 0.99)
    right = logits.argmax(-1) == labels
    assert right[certain].float().mean().item() == pytest.approx(0.75, abs=0.1)


def test_zipfs_labels_are_as_frequent_as_words():
    head = replace(TINY, tokens=4096, ignored=0.0, zipf=True)
    _, _, labels = batch(head, device="cpu")
    counts = labels.bincount(minlength=head.vocab_size)
    assert len(counts) == head.vocab_size
    share = math.log(2) / math.log(head.vocab_size)  # of the first rank
    assert counts[0].item() / head.tokens == pytest.approx(share, abs=0.02)
    assert (counts[:4].diff() < 0).all()


def test_a_batch_is_the_same_for_the_same_seed():
    first, again, other = (batch(TINY, device="cpu", seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_a_frozen_head_gets_no_gradient():
    inputs = batch(replace(TINY, frozen=True), device="cpu")
    assert not inputs[1].requires_grad
    assert len(step(eager(TINY), *inputs)) == 2


def test_eager_comes_first_and_the_sweep_has_fewer():
    names = list(contenders(TINY, compiled=False))
    assert names[0] == "eager"
    others = [OTHER_GPUS, *(f"{OTHER_GPUS}, {budget} MiB" for budget in BUDGETS_OF_OTHERS_MIB)]
    budgets = [OURS, *(f"{OURS} {budget} MiB" for budget in BUDGETS_MIB)]
    assert names[-7:] == [*budgets, *others, OF_HOPPER]
    assert set(sweep_contenders(TINY)) <= {"eager", "Liger-Kernel", OURS, OF_HOPPER}
    larger = contenders(replace(TINY, tokens=513), compiled=False)
    assert list(larger)[-6:] == [*budgets, *others]


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


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="from torch 2.13 on")
def test_pytorchs_own_loss_is_right_and_has_no_softcap():
    pytorch = contenders(TINY, compiled=False)["PyTorch"]
    errors = gradient_errors(TINY, {"eager": eager(TINY), "PyTorch": pytorch}, device="cpu")
    assert is_right(errors["PyTorch"], errors["eager"])
    capped = replace(TINY, softcap=5.0)
    with pytest.raises(Unsupported, match="no softcap"):
        contenders(capped, compiled=False)["PyTorch"](*batch(capped, device="cpu"))


def test_a_peer_that_is_not_installed_is_left_out_and_said(monkeypatch, capsys):
    monkeypatch.setattr(head_contenders, "find_spec", lambda module: None)
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    linear_cross_entropy.cases(argparse.Namespace(case="", part=None, no_compile=True, rounds=1))
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "Liger-Kernel is left out: the package liger-kernel is not installed",
        "CCE is left out: the package cut-cross-entropy is not installed",
        "TRL is left out: the package trl is not installed",
        "QuACK is left out: the package quack-kernels is not installed",
        "Unsloth is left out: the package unsloth is not installed",
        "PyTorch is left out: linear_cross_entropy is in torch 2.13 and later, "
        f"got {torch.__version__}",
    ]
    assert head_contenders.peers(TINY) == {}
    monkeypatch.setattr(head_contenders, "find_spec", lambda module: module == "quack")
    assert list(head_contenders.peers(TINY)) == ["QuACK", "QuACK, base"]


def unsloth_fused_ce_loss(
    trainer, hidden_states, lm_head_weight, lm_head_bias, labels, *, shift_labels, **transforms
) -> torch.Tensor:
    """With the arguments that unsloth_zoo 2026.10 has, for batches of sequences."""
    assert (trainer, lm_head_bias, shift_labels) == (None, None, False)
    assert hidden_states.shape[:2] == labels.shape
    softcap = transforms.pop("logit_softcapping") or None
    assert transforms == {}
    return eager(replace(TINY, softcap=softcap))(hidden_states[0], lm_head_weight, labels[0])


@pytest.mark.parametrize("head", [TINY, replace(TINY, softcap=5.0), replace(TINY, frozen=True)])
def test_unsloths_loss_is_called_as_its_models_call_it(head: Head, monkeypatch):
    monkeypatch.setattr(head_contenders, "find_spec", lambda module: module == "unsloth")
    monkeypatch.setenv("UNSLOTH_IS_PRESENT", "1")
    module = SimpleNamespace(unsloth_fused_ce_loss=unsloth_fused_ce_loss)
    monkeypatch.setitem(sys.modules, "unsloth_zoo", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "unsloth_zoo.fused_losses", module)
    losses = {"eager": eager(head), "Unsloth": head_contenders.peers(head)["Unsloth"]}
    errors = gradient_errors(head, losses, device="cpu")
    assert errors["Unsloth"] == errors["eager"]
    assert "unsloth" not in sys.modules


@pytest.mark.parametrize(("hidden_size", "chunk"), [(16, 4096), (4096, 2048)])
def test_quacks_two_pipelines_are_called(hidden_size: int, chunk: int, monkeypatch):
    """Its default one with half of its chunk, where that has as many rows as columns."""
    called = []

    def chunked_linear_cross_entropy(
        x, weight, target, chunk_size=4096, ignore_index=-100, use_scaled_exp=None
    ) -> torch.Tensor:
        called.append((chunk_size, use_scaled_exp))
        return eager(TINY)(x, weight, target)

    monkeypatch.setattr(head_contenders, "find_spec", lambda module: module == "quack")
    module = SimpleNamespace(chunked_linear_cross_entropy=chunked_linear_cross_entropy)
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy", module)
    head = replace(TINY, hidden_size=hidden_size)
    losses = {name: head_contenders.peers(head)[name] for name in ("QuACK", "QuACK, base")}
    errors = gradient_errors(head, {"eager": eager(head), **losses}, tokens=8, device="cpu")
    assert called == [(chunk, None), (4096, False)]
    assert errors["QuACK"] == errors["QuACK, base"] == errors["eager"]
    capped = replace(TINY, softcap=5.0)
    with pytest.raises(Unsupported, match="no softcap"):
        head_contenders.peers(capped)["QuACK"](*batch(capped, device="cpu"))


@pytest.mark.parametrize("device", DEVICES)
def test_a_contender_that_fails_is_reported_and_stops_nothing(device: str):
    losses = {
        "eager": eager(TINY),
        "huge": lambda *_: torch.empty(2**56, device=device),
        "raises": raising,
        "wrong": wrong,
        "liger_patch": ours(TINY),
    }
    rows = {row["contender"]: row for row in run_case(TINY, losses, rounds=1, device=device)}
    assert list(rows) == [LOWER_BOUND, *losses]
    for name in (LOWER_BOUND, "eager", "liger_patch"):
        assert rows[name]["ms"] > 0
        assert rows[name]["floor_over_time"] > 0
        assert rows[name]["host_ms"] > 0
    for name in ("eager", "liger_patch"):
        assert len(rows[name]["gradient_errors"]) == 2
        assert len(rows[name]["gradient_errors_power_of_two"]) == 2
    assert "ms" not in rows["huge"]
    assert device == "cpu" or rows["huge"]["failure"] == "out of memory"
    assert rows["raises"]["failure"] == "does not run: ValueError: weight is too long"
    assert rows["wrong"]["wrong"] is True
    assert rows["wrong"]["gradient_errors"][0] == pytest.approx(0.1, rel=0.1)
    assert json.loads(json.dumps(list(rows.values()))) == list(rows.values())


@pytest.mark.parametrize("is_loaded", [True, False])
def test_the_device_is_idle_before_each_call_if_asked(is_loaded: bool, monkeypatch):
    loads = []
    measure = linear_cross_entropy.measure

    def noting(*args, before, **kwargs):
        loads.append(before)
        return measure(*args, before=before, **kwargs)

    monkeypatch.setattr(linear_cross_entropy, "measure", noting)
    losses = {"eager": eager(TINY), "liger_patch": ours(TINY)}
    rows = run_case(TINY, losses, rounds=1, device="cpu", is_loaded=is_loaded)
    assert [load is not None for load in loads] == [is_loaded]
    report = {"idle": rows, "gpu": "CPU", "date": "", "versions": {}, "command": "c"}
    heading, _, line, *_ = idle_table(report).splitlines()
    assert heading == "| forward + backward, ms (host) | matmul-only bound | eager | liger_patch |"
    assert re.fullmatch(r"\| tiny, 40 tokens (\| [\d.]+ \([\d.]+\) ){3}\|", line)
    assert idle_table({}) == ""


def test_contenders_are_chosen_by_the_start_of_their_names(monkeypatch):
    named = {"eager": eager(TINY), "liger_patch": ours(TINY), "liger_patch 768 MiB": ours(TINY)}
    monkeypatch.setattr(linear_cross_entropy, "contenders", lambda *_, **__: named)
    monkeypatch.setattr(linear_cross_entropy, "run_case", lambda head, losses, **_: list(losses))
    options = argparse.Namespace(part="cases", case=None, rounds=1, no_compile=True)
    for asked, names in ((None, list(named)), (["liger_patch 7"], ["eager", *list(named)[2:]])):
        options.contender = asked
        assert linear_cross_entropy.cases(options)["results"][0]() == names
    options.contender = ["CCE"]
    with pytest.raises(SystemExit, match="starts with CCE: they are eager, liger_patch, "):
        linear_cross_entropy.cases(options)["results"][0]()


def test_a_case_without_room_for_its_inputs_is_reported():
    huge = replace(TINY, vocab_size=2**56)
    (row,) = run_case(huge, {"eager": eager(huge)}, rounds=1, device="cpu")
    assert row["contender"] == LOWER_BOUND
    assert row["failure"].startswith("does not run: RuntimeError")
