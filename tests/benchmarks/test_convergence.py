"""The benchmark of convergence, tiny and on the CPU: what it compares, and what it would notice."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import convergence
from benchmarks.convergence import (
    MODEL_TYPES,
    Contender,
    Settings,
    contenders,
    finish,
    run_model_type,
)
from benchmarks.convergence_report import (
    by_seed,
    curve_difference,
    terminal_convergence_table,
    verdicts,
)
from benchmarks.step_tables import convergence_table
from examples.corpus import Corpus, build_corpus
from liger_patch import apply_patch
from liger_patch.layers.replace import LAYERS

SETTINGS = Settings(
    vocab_size=300,
    hidden_size=64,
    head_dim=32,
    layers=2,
    length=32,
    batch_size=4,
    steps=12,
    evaluate_every=5,
    evaluation_tokens=256,
    learning_rate=2e-3,
    dtype="float32",
)
ABSENT = "lora", "tensor_parallel"  # without adapters, in one process
FILES = 40  # of the standard library
PATCHED = ["liger_patch", "liger_patch, layers"]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    from examples import corpus

    with pytest.MonkeyPatch.context() as patched:
        files = corpus.source_files()[:FILES]
        patched.setattr(corpus, "source_files", lambda: files)
        return build_corpus(
            SETTINGS.vocab_size,
            SETTINGS.length,
            evaluation_tokens=SETTINGS.evaluation_tokens,
        )


@pytest.fixture(scope="module")
def runs(corpus: Corpus) -> list[dict]:
    return run_model_type("gemma2", SETTINGS, corpus, device="cpu")


def with_wrong_labels(model: PreTrainedModel) -> None:
    """Each position learns the token whose number is one higher."""
    apply_patch(model)

    def shifted(module, args, kwargs):
        return args, {**kwargs, "labels": (kwargs["labels"] + 1) % SETTINGS.vocab_size}

    model.register_forward_pre_hook(shifted, with_kwargs=True)


def with_a_loss_too_good(model: PreTrainedModel) -> None:
    def less(module, args, outputs):
        outputs.loss = outputs.loss - 1

    model.register_forward_hook(less)


def report_of(rows: list[dict]) -> dict:
    return {
        "command": "python -m benchmarks convergence",
        "date": "2026-01-01",
        "gpu": "GPU",
        "versions": {"torch": "2.6", "triton": "3.2"},
        "settings": {**asdict(SETTINGS), "evaluated_after": SETTINGS.evaluated_after()},
        "convergence": rows,
    }


def test_every_contender_is_trained_and_the_patched_ones_are_fused(runs: list[dict]):
    assert [run["contender"] for run in runs] == [one.name for one in contenders(SETTINGS)]
    assert SETTINGS.evaluated_after() == [5, 10, 12]
    assert all(len(run["training"]) == SETTINGS.steps for run in runs)
    assert all(len(run["held_out"]) == 3 for run in runs)
    assert runs[0]["training"][0] == pytest.approx(math.log(300), rel=0.05)  # uniform guessing
    assert all(run["held_out"][-1] < run["held_out"][0] - 0.1 for run in runs)
    assert [run["contender"] for run in runs if run["patched"]] == PATCHED
    assert all(run["fused"] for run in runs if run["patched"])
    assert runs[-2]["layers"] == "its own"
    assert all(layer in runs[-1]["layers"] for layer in LAYERS if layer not in ABSENT)


@pytest.mark.parametrize("adapters", ["LoRA", "QLoRA"])
def test_adapters_are_trained_on_kernels_too(adapters: str, corpus: Corpus):
    if adapters == "QLoRA":
        pytest.importorskip("bitsandbytes")
    settings = replace(SETTINGS, adapters=adapters, hidden_size=128, head_dim=64, steps=6)
    runs = run_model_type("llama", settings, corpus, device="cpu")
    assert {run["model"] for run in runs} == {f"llama + {adapters}"}
    assert all(run["held_out"][-1] < run["held_out"][0] for run in runs)
    assert all(verdict.holds for verdict in verdicts(runs))
    assert all(run["fused"] for run in runs if run["patched"])
    assert "lora" in runs[-1]["layers"]
    eager, other_seed = runs[:2]
    for run in runs[-2:]:
        assert curve_difference(run, eager) < curve_difference(other_seed, eager) / 100


def test_the_last_step_is_evaluated_once():
    assert replace(SETTINGS, steps=10).evaluated_after() == [5, 10]
    assert replace(SETTINGS, steps=3).evaluated_after() == [3]


def test_a_seed_gives_one_curve_and_another_seed_another(runs: list[dict], corpus: Corpus):
    eager, *others = by_seed(runs).values()
    (again,) = run_model_type(
        "gemma2", SETTINGS, corpus, device="cpu", of=lambda settings: [Contender("again")]
    )
    assert again["training"] == eager["training"]
    assert again["held_out"] == eager["held_out"]
    assert [other["seed"] for other in others] == [1, 2, 3]
    assert all(curve_difference(other, eager) > 0.01 for other in others)


def test_a_seed_orders_the_text_and_leaves_none_out():
    blocks = torch.arange(7)[:, None]
    few = replace(SETTINGS, batch_size=3, steps=6)

    def order(seed: int) -> list[int]:
        batches = list(convergence._batches(blocks, few, seed))
        assert [len(batch) for batch in batches] == [3] * 6
        return torch.cat(batches).flatten().tolist()

    assert sorted(order(0)[:7]) == sorted(order(0)[7:14]) == list(range(7))
    assert order(0)[:7] != order(0)[7:14]
    assert order(0) != order(1)


def test_patched_runs_in_float32_are_eagers(runs: list[dict]):
    eager, other_seed = runs[:2]
    for run, verdict in zip(runs[-2:], verdicts(runs), strict=True):
        assert verdict.holds
        assert abs(verdict.difference) < verdict.spread / 100
        assert curve_difference(run, eager) < curve_difference(other_seed, eager) / 100


def test_wrong_labels_are_noticed(runs: list[dict], corpus: Corpus):
    wrong = Contender("liger_patch", prepare=with_wrong_labels)
    more = run_model_type("gemma2", SETTINGS, corpus, device="cpu", of=lambda settings: [wrong])
    (verdict,) = verdicts([*by_seed(runs).values(), *more])
    assert verdict.fused
    assert verdict.difference > verdict.spread
    assert not verdict.holds
    assert str(verdict) == "NOT less than seeds differ"


def test_the_held_out_loss_is_not_the_patched_models_word(runs: list[dict], corpus: Corpus):
    boast = Contender("liger_patch", prepare=with_a_loss_too_good)
    (run,) = run_model_type("gemma2", SETTINGS, corpus, device="cpu", of=lambda settings: [boast])
    assert run["training"] == pytest.approx([loss - 1 for loss in runs[0]["training"]], abs=1e-4)
    assert run["held_out"] == runs[0]["held_out"]


def test_a_loss_of_nan_is_not_within_the_spread(runs: list[dict]):
    bad = {**runs[-1], "held_out": [*runs[-1]["held_out"][:-1], math.nan]}
    assert [verdict.holds for verdict in verdicts([*runs[:-1], bad])] == [True, False]
    assert finish({"convergence": runs}) == 0
    assert finish({"convergence": [*runs[:-1], bad]}) == 1
    said = "NOT less than seeds differ"
    assert f"as near to eager's as seeds do: gemma2, liger_patch ({said})." in convergence_table(
        report_of([*runs[:-1], bad])
    )


def test_a_run_that_was_not_fused_shows_nothing(
    runs: list[dict], corpus: Corpus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    ours = Contender("liger_patch", prepare=apply_patch)
    more = run_model_type("gemma2", SETTINGS, corpus, device="cpu", of=lambda settings: [ours])
    (verdict,) = verdicts([*by_seed(runs).values(), *more])
    assert abs(verdict.difference) < verdict.spread
    assert not verdict.holds
    assert str(verdict) == "not fused"


def test_tables_have_every_model_and_run(runs: list[dict]):
    rows = [{**run, "model": model} for model in MODEL_TYPES for run in runs]
    table = convergence_table(report_of(rows))
    ends = [f"{run['held_out'][-1]:.4f}" for run in runs]
    cells = f"0 M parameters | {ends[0]} | {', '.join(ends[1:4])} | {ends[4]} ("
    assert all(f"| {model}, {cells}" in table for model in MODEL_TYPES)
    assert "Every patched run ends nearer to eager's than the furthest" in table
    said = terminal_convergence_table(runs)
    assert all(f"  {run['contender']:24s}{run['held_out'][-1]:10.5f}" in said for run in runs)
    assert said.count("less than seeds differ") == len(PATCHED)
