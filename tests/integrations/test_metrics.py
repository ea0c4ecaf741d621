"""Metrics of Trainer's evaluation are those of the logits, which nothing computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_batch, tiny_model
from trainers import QUIET, samples_of

from liger_patch import apply_patch
from liger_patch.integrations import metrics
from liger_patch.integrations.metrics import compute_metrics, preprocess_logits_for_metrics

pytest.importorskip("accelerate", reason="Trainer needs accelerate")

from transformers import EvalPrediction, PreTrainedModel, Trainer, TrainingArguments

METRICS = ["eval_accuracy", "eval_perplexity", "eval_entropy", "eval_loss"]


def evaluate(folder: Path, model: PreTrainedModel, **how: Any) -> dict[str, float]:
    samples = samples_of(tiny_batch(model, batch=5, length=24))
    samples[3] = {name: value[:17] for name, value in samples[3].items()}
    arguments = TrainingArguments(str(folder), per_device_eval_batch_size=1, **QUIET, **how)
    trainer = Trainer(
        model=model,
        args=arguments,
        eval_dataset=samples,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    metrics = trainer.evaluate()
    return {name: metrics[name] for name in METRICS}


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "granite"])  # plain, capped, scaled
@pytest.mark.parametrize("bf16", [False, True])
def test_metrics_are_eagers(model_type: str, bf16: bool, reads: list[Any], tmp_path: Path) -> None:
    model = tiny_model(model_type)
    expected = evaluate(tmp_path, model, bf16=bf16)
    found = evaluate(tmp_path, apply_patch(model, layers=False), bf16=bf16)
    assert not reads
    assert 0 < found["eval_entropy"] < np.log(model.config.vocab_size)
    assert found == pytest.approx(expected, rel=1e-2 if bf16 else 1e-5)


def test_accuracy_counts_the_supervised_tokens_of_all_batches() -> None:
    labels = np.array([[-100, 1, 2], [0, -100, 2]])
    values = np.zeros((2, 3, 3))
    values[0, 0], values[0, 1], values[1, 1] = (-1.0, 1, 0.5), (-2.0, 0, 1.5), (-3.0, 1, 1.0)
    values[:, 2] = values[1, 0] = -100.0
    prediction = EvalPrediction(predictions=values, label_ids=labels)
    expected = {"accuracy": 2 / 3, "perplexity": np.exp(2.0), "entropy": 1.0}
    assert compute_metrics(prediction) == pytest.approx(expected)
    nothing = EvalPrediction(predictions=values, label_ids=np.full((2, 3), -100))
    assert compute_metrics(nothing) == {}


def test_what_does_not_fit_is_named() -> None:
    prediction = EvalPrediction(predictions=np.zeros((2, 3, 9)), label_ids=np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"\(B, T, 3\).* got \(2, 3, 9\)"):
        compute_metrics(prediction)
    for shape in ((2, 4), (3, 3), (2,)):
        prediction = EvalPrediction(predictions=np.zeros((2, 3, 3)), label_ids=np.zeros(shape))
        with pytest.raises(
            ValueError, match=r"label_ids must be \(B, T\) beside .*\(2, 3, 3\), got"
        ):
            compute_metrics(prediction)
    batches: Any = [np.zeros((2, 3, 3)), np.zeros((2, 4, 3))]
    with pytest.raises(ValueError, match="got a list of batches: leave eval_do_concat_batches"):
        compute_metrics(EvalPrediction(predictions=batches, label_ids=batches))
    with pytest.raises(ValueError, match=r"got \(2, 9\) and \(2, 3\)"):
        preprocess_logits_for_metrics(torch.zeros(2, 9), torch.zeros(2, 3, dtype=torch.long))
    nothing: Any = None
    with pytest.raises(ValueError, match="labels must be a tensor or a tuple with it, got None"):
        preprocess_logits_for_metrics(torch.zeros(2, 3, 9), nothing)
    with pytest.raises(ValueError, match=r"logits must be .* got \(None,\)"):
        preprocess_logits_for_metrics((nothing,), torch.zeros(2, 3))


def test_the_models_budget_of_logits_is_kept(record: Callable[..., list[Any]]) -> None:
    model = apply_patch(tiny_model(), chunk_mib=3)
    batch = tiny_batch(model)
    given = record(metrics, "fused_log_probs", lambda *_, chunk_mib, **how: chunk_mib)
    with torch.no_grad():
        preprocess_logits_for_metrics(model(**batch).logits, batch["labels"])
    assert given == [3]
