"""The benchmark of convergence, tiny and on the CPU: what it compares, and what it would notice."""

from __future__ import annotations

import math

import pytest

from benchmarks.convergence import (
    Settings,
    contenders,
    run_model_type,
)
from examples.corpus import Corpus, build_corpus
from liger_patch.layers.replace import LAYERS

pytestmark = pytest.mark.slow
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
    others = ("experts", "recurrent", "delta_net", "lora")
    assert all(layer in runs[-1]["layers"] for layer in LAYERS if layer not in others)
