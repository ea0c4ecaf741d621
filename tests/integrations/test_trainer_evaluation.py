"""transformers.Trainer evaluates and predicts with a patched model as with an eager one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_runs import LENGTH, assert_fused, assert_same_training, eager_and_patched, make_trainer
from trainers import LargestTensor

pytestmark = pytest.mark.usefixtures("imported_objects_are_not_collected")


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_training_and_loss_only_evaluation_hold_no_logits(
    model_type: str, bf16: bool, tmp_path: Path
) -> None:
    largest = {}
    for patch, model in enumerate(eager_and_patched(model_type)):
        # wide batches: their logits are larger than any weight
        sizes = {"per_device_train_batch_size": 10, "per_device_eval_batch_size": 10}
        trainer = make_trainer(model, tmp_path, bf16=bf16, **sizes)
        for part in (trainer.train, trainer.evaluate):
            with LargestTensor() as seen:
                part()
            largest[patch, part.__name__] = seen.elements
    logits = 10 * LENGTH * model.config.vocab_size
    assert {name for name, elements in largest.items() if elements >= logits} == {
        (0, "train"),
        (0, "evaluate"),
    }
    assert_fused(model)


def test_evaluation_between_the_steps_leaves_training_alone(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "compute_metrics": lambda _: {}}
    assert_fused(assert_same_training("gemma2", tmp_path, **options))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"bf16": True}, id="bf16"),
        pytest.param({"bf16_full_eval": True}, id="bf16_full_eval"),
        pytest.param({"eval_accumulation_steps": 1}, id="eval_accumulation_steps"),
        pytest.param({"batch_eval_metrics": True}, id="batch_eval_metrics"),
        pytest.param({"include_for_metrics": ["inputs", "loss"]}, id="include_for_metrics"),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_compute_metrics_gets_eagers_logits(
    model_type: str, options: dict[str, Any], tmp_path: Path
) -> None:
    seen: tuple[list[Any], list[Any]] = [], []
    for model, into in zip(eager_and_patched(model_type, layers=False), seen, strict=True):
        trainer = make_trainer(
            model,
            tmp_path,
            compute_metrics=lambda p, compute_result=True, into=into: (
                into.append(p.predictions) or {}
            ),
            **options,
        )
        trainer.evaluate()
    assert len(seen[1]) > 0
    for eager, ours in zip(*seen, strict=True):
        assert isinstance(ours, type(eager))
        assert np.array_equal(ours, eager)
    assert_fused(model)
