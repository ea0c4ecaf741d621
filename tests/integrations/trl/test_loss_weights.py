"""The column ``loss_weights`` through TRL's preparation, packing and loss: a training by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_samples import Sample
from training_step import widened
from trl_models import MARKS, assert_fused, in_float64, make_model
from weighted_samples import (
    LENGTHS,
    arguments,
    in_order,
    trained_by_hand,
    truth_of,
    weighted_samples,
    weights_of,
)

pytestmark = MARKS

MODES: dict[str, dict[str, Any]] = {
    "padded": {},
    "truncated": {"max_length": 8},
    "padding_free": {"padding_free": True, "max_length": None},
    "packed": {"packing": True, "max_length": 16},
    "packed and split": {"packing": True, "max_length": 8, "packing_strategy": "bfd_split"},
    "wrapped": {"packing": True, "max_length": 8, "packing_strategy": "wrapped"},
}


def make_trainer(folder: Path, flag: bool = True, data: Any = None, **how: Any) -> Any:
    from datasets import Dataset
    from tiny_text import tiny_tokenizer

    from liger_patch.integrations.trl import SFTConfig, SFTTrainer

    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    sizes |= {"bf16": False, "gradient_checkpointing": False, "use_liger_patch": flag}
    samples = Dataset.from_list(weighted_samples(*LENGTHS) if data is None else data)
    return in_order(
        SFTTrainer(
            model=widened(make_model()),
            args=SFTConfig(**arguments(folder, **{**sizes, **how})),
            train_dataset=samples,
            eval_dataset=samples,
            processing_class=tiny_tokenizer(),
        )
    )


def sequences(rows: Sequence[dict[str, Any]]) -> list[Sample]:
    """Those of prepared rows."""
    found: list[Sample] = []
    for row in rows:
        start = 0
        for length in row.get("seq_lengths") or [len(row["input_ids"])]:
            part = slice(start, start + length)
            found.append({name: row[name][part] for name in ("input_ids", "labels")})
            start += length
    return found


@pytest.mark.parametrize("flag", [None, "1"], ids=["fused", "LIGER_PATCH_RETURN_LOGITS=1"])
@pytest.mark.parametrize("mode", MODES)
def test_steps_are_those_by_hand(
    mode: str, flag: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, gradient_accumulation_steps=2, max_steps=1, **MODES[mode])
    rows = list(trainer.train_dataset)[:4]
    assert any(-100 in row["labels"] for row in rows)
    for row in rows:  # whatever TRL has cut and packed
        weights = [0.0 if each == -100 else weights_of([each])[0] for each in row["labels"]]
        assert row["loss_weights"] == weights
    expected = trained_by_hand(widened(make_model()), [sequences(rows)])
    if flag:
        monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", flag)
    with in_float64():
        trainer.train()
    found = {name: p.detach() for name, p in trainer.model.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    if flag is None:
        assert_fused(trainer.model)


def test_an_evaluation_is_the_weighted_mean(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=8)
    expected = truth_of(widened(make_model()), weighted_samples(*LENGTHS))["loss"].item()
    with in_float64():
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_small_weights_are_not_rounded_up_to_one(tmp_path: Path) -> None:
    """TRL divides by at least 1, which the sum of small weights is below."""
    moved = []
    for scale in (1.0, 2.0**-10):
        data = weighted_samples(*LENGTHS)
        for sample in data:
            sample["loss_weights"] = [scale * each for each in sample["loss_weights"]]
        trainer = make_trainer(tmp_path, data=data)
        with in_float64():
            trainer.train()
        moved.append({name: p.detach() for name, p in trainer.model.named_parameters()})
    torch.testing.assert_close(moved[0], moved[1])


def test_metrics_are_those_without_weights(tmp_path: Path) -> None:
    plain = [
        {k: v for k, v in s.items() if k != "loss_weights"} for s in weighted_samples(*LENGTHS)
    ]
    found = []
    for data in (None, plain):
        with in_float64():
            found.append(make_trainer(tmp_path, data=data).evaluate())
    for name in ("eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"):
        assert found[0][name] == found[1][name], name
    assert found[0]["eval_loss"] != found[1]["eval_loss"]


def test_without_the_flag_the_column_means_nothing(tmp_path: Path) -> None:
    plain = [
        {k: v for k, v in s.items() if k != "loss_weights"} for s in weighted_samples(*LENGTHS)
    ]
    losses = []
    for data in (None, plain):
        with in_float64():
            losses.append(make_trainer(tmp_path, flag=False, data=data).evaluate()["eval_loss"])
    assert losses[0] == losses[1]


def test_weights_of_text_are_an_error(tmp_path: Path) -> None:
    data = [{"text": "w9 w10", "loss_weights": [1.0, 2.0]}] * 4
    with pytest.raises(ValueError, match="needs a data set of tokens"):
        make_trainer(tmp_path, data=data)


def test_masks_without_labels_are_an_error(tmp_path: Path) -> None:
    data = [{"input_ids": [9, 8], "completion_mask": [0, 1], "loss_weights": [1.0, 2.0]}] * 4
    with pytest.raises(ValueError, match="with 'labels' where it has masks"):
        make_trainer(tmp_path, data=data)


def test_dft_has_weights_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="loss_weights are for loss_type=\"nll\", got 'dft'"):
        make_trainer(tmp_path, loss_type="dft").train()
