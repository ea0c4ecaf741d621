"""The column ``loss_weights`` of a data set in our Trainer: the truth is a training by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packed_samples import IGNORED, flattened, make_model, padded
from tiny_text import tiny_tokenizer
from training_step import Float64, Step
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PreTrainedModel,
)
from weighted_samples import (
    LENGTHS,
    arguments,
    in_order,
    trained_by_hand,
    truth_of,
    weighted_samples,
    weights_of,
)

from liger_patch import apply_patch, patch_status
from liger_patch.integrations.loss_weights import WeightedCollator, joined
from liger_patch.patch.token_weights import WEIGHT_BITS

COLLATORS = {
    "flattening": lambda: DataCollatorWithFlattening(),
    "padding": lambda: DataCollatorForSeq2Seq(tiny_tokenizer()),
    "padding on the left": lambda: lambda samples: padded(samples, "left"),
}


def make_trainer(
    model: PreTrainedModel, folder: Path, collate: Any = flattened, data: Any = None, **how: Any
) -> Any:
    from transformers import TrainingArguments

    from liger_patch.integrations.transformers import Trainer

    samples = weighted_samples(*LENGTHS) if data is None else data
    return in_order(
        Trainer(
            model=model,
            args=TrainingArguments(**arguments(folder, **how)),
            data_collator=collate,
            train_dataset=samples,
            eval_dataset=samples,
        )
    )


def trained(trainer: Any) -> Step:
    with Float64():
        trainer.train()
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.usefixtures("imported_objects_are_not_collected")
@pytest.mark.parametrize("flag", [None, "1"], ids=["fused", "LIGER_PATCH_RETURN_LOGITS=1"])
@pytest.mark.parametrize("collator", COLLATORS)
def test_steps_are_those_by_hand(
    collator: str, flag: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = weighted_samples(*LENGTHS)
    expected = trained_by_hand(make_model(), [samples[:4], samples[4:]])
    if flag:
        monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", flag)
    for per_device, accumulated in [(4, 1), (2, 2), (1, 4)]:
        model = apply_patch(make_model())
        sizes = {"per_device_train_batch_size": per_device}
        sizes["gradient_accumulation_steps"] = accumulated
        trainer = make_trainer(model, tmp_path, COLLATORS[collator](), **sizes)
        torch.testing.assert_close(trained(trainer), expected)
        assert patch_status(model).fused is (flag is None)


@pytest.mark.usefixtures("imported_objects_are_not_collected")
def test_an_evaluation_is_the_weighted_mean(tmp_path: Path) -> None:
    model, samples = make_model(), weighted_samples(*LENGTHS)
    expected = truth_of(model, samples)["loss"].item()
    trainer = make_trainer(apply_patch(model), tmp_path, per_device_eval_batch_size=8)
    with Float64():
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("imported_objects_are_not_collected")
def test_a_data_set_of_datasets_keeps_its_column(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    samples = weighted_samples(*LENGTHS)
    expected = trained_by_hand(make_model(), [samples[:4], samples[4:]])
    data = datasets.Dataset.from_list([{**each, "source": "book"} for each in samples])
    model = apply_patch(make_model())
    trainer = make_trainer(model, tmp_path, data=data, per_device_train_batch_size=4)
    torch.testing.assert_close(trained(trainer), expected)


@pytest.mark.parametrize("collator", COLLATORS)
def test_a_batch_has_the_weight_of_each_label(collator: str) -> None:
    batch = WeightedCollator(COLLATORS[collator]())(weighted_samples(9, 4, 13))
    weights = batch[WEIGHT_BITS].view(torch.float32)
    expected = torch.tensor([weights_of(row) for row in batch["labels"].tolist()])
    supervised = batch["labels"] != IGNORED
    assert torch.equal(weights, expected.where(supervised, 0.0))
    assert torch.equal(batch["labels"][supervised], batch["input_ids"][supervised])


@pytest.mark.parametrize("first", [0, 1])
def test_weights_of_some_samples_are_an_error(first: int) -> None:
    samples = weighted_samples(9, 4)
    del samples[first]["loss_weights"]
    with pytest.raises(ValueError, match="'loss_weights' in 1 of 2 samples"):
        WeightedCollator(flattened)(samples)


def test_samples_without_weights_are_those_of_the_collator() -> None:
    samples = [{k: v for k, v in s.items() if k != "loss_weights"} for s in weighted_samples(9, 4)]
    torch.testing.assert_close(WeightedCollator(flattened)(samples), flattened(samples))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_weights": [1.0] * 3}, r"in the shape of the labels \(4,\), got float64 \(3,\)"),
        ({"loss_weights": ["a"] * 4}, r"in the shape of the labels \(4,\), got <U1 \(4,\)"),
        (
            {"loss_weights": [1.0, -1.0, 1.0, 1.0]},
            "must be finite and >= 0 .* got -1.0 for token 1",
        ),
        (
            {"loss_weights": [1.0, float("nan"), 1.0, 1.0]},
            "must be finite and >= 0 .* got nan for token 1",
        ),
        ({"labels": None}, "needs a column 'labels' beside it, got none"),
        ({"labels": [1, 2, 3, 2**31]}, r"labels must be .* below 2\^31 .* got int64 2147483648"),
        ({"labels": [1, 2, 3, 1.5]}, "labels must be whole numbers .* got float64 3.0"),
    ],
)
def test_a_sample_that_does_not_fit_is_an_error(changes: dict[str, Any], message: str) -> None:
    (sample,) = weighted_samples(4)
    sample = {name: v for name, v in {**sample, **changes}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        WeightedCollator(flattened)([sample])


def test_a_sample_of_a_data_set_that_lacks_weights_is_an_error() -> None:
    (sample,) = weighted_samples(4)
    with pytest.raises(ValueError, match="must be given to all samples, got None in one"):
        joined({**sample, "loss_weights": None})


def test_a_collator_that_makes_labels_itself_is_an_error() -> None:
    collator = WeightedCollator(DataCollatorForLanguageModeling(tiny_tokenizer(), mlm=False))
    with pytest.raises(ValueError, match="of type DataCollatorForLanguageModeling, does not keep"):
        collator(weighted_samples(4, 4))


@pytest.mark.usefixtures("imported_objects_are_not_collected")
@pytest.mark.parametrize(
    ("patches", "how", "message"),
    [
        (False, {}, "but the model is not patched"),
        (True, {"label_smoothing_factor": 0.1}, r"but label_smoothing_factor=0\.1"),
    ],
)
def test_weights_that_cannot_reach_the_loss_are_an_error(
    patches: bool, how: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = apply_patch(make_model()) if patches else make_model()
    with pytest.raises(ValueError, match=message):
        trained(make_trainer(model, tmp_path, per_device_train_batch_size=4, **how))
