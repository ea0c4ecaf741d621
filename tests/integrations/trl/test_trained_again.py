"""Models with TRL's head that are reverted after training, trained again, copied or saved."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exactness import assert_same_bits
from tiny_models import tiny_batch, tiny_model
from trainers import samples_of
from training_step import Step, assert_fused, assert_right, widened
from transformers import PreTrainedModel
from trl_models import (
    DEFAULTS,
    MARKS,
    apply_trl_patch,
    call,
    in_float64,
    sft_trainer,
    train,
    with_head,
)

from liger_patch import apply_patch, revert_patch

pytestmark = MARKS


def transformers_trainer(
    model: PreTrainedModel, folder: Path, patch: bool | None, *, bf16: bool
) -> Any:
    if patch:
        apply_patch(model)
    config = transformers.TrainingArguments(str(folder), **{**DEFAULTS, "bf16": bf16})
    return transformers.Trainer(model, config, train_dataset=samples_of(tiny_batch(model)))


@pytest.mark.parametrize(
    ("first", "reverts", "bf16"),
    [
        pytest.param(sft_trainer, False, False, marks=pytest.mark.slow),
        (sft_trainer, False, True),  # accelerate's autocast stays on the model
        pytest.param(sft_trainer, True, True, marks=pytest.mark.slow),
        (transformers_trainer, False, True),
    ],
)
def test_one_model_goes_through_two_trainers(
    first: Callable[..., Any], reverts: bool, bf16: bool, trls_calls: list[Any], tmp_path: Path
) -> None:
    """SFTTrainer takes its patch back by itself."""

    def train_twice(model: PreTrainedModel, patch: bool | None, bf16: bool) -> Step:
        wide = model.dtype == torch.float64
        with in_float64() if wide else contextlib.nullcontext():
            first(model, tmp_path, patch, bf16=bf16).train()
        if patch and reverts:
            revert_patch(model)
        results = train(sft_trainer(model, tmp_path, patch, bf16=bf16))
        return {name: value for name, value in results.items() if "accurac" not in name}

    truth = train_twice(widened(tiny_model()), None, False)
    trls = train_twice(tiny_model(), None, bf16)
    model = tiny_model()
    trls_calls.clear()
    ours = train_twice(model, True, bf16)
    assert trls_calls == []
    assert_fused(model)
    assert_right(ours, trls, truth, torch.bfloat16 if bf16 else torch.float32)
    assert model(**tiny_batch(model)).loss.isfinite()
    assert model.generate(torch.tensor([[9, 10]]), max_new_tokens=2).shape == (1, 4)


def test_a_copy_computes_with_its_own_weights() -> None:
    model = apply_trl_patch(with_head(tiny_model("gemma2")))
    batch = tiny_batch(model)
    before = call(model, batch)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter *= 0.5
    expected = apply_trl_patch(with_head(tiny_model("gemma2")))
    expected.load_state_dict(copied.state_dict())
    assert_same_bits(call(copied, batch), call(expected, batch))
    assert torch.equal(copied(**batch).loss, expected(**batch).loss)
    for inputs in (batch, {"input_ids": batch["input_ids"]}):
        assert torch.equal(copied(**inputs).logits, expected(**inputs).logits)
    assert_fused(copied)
    assert_same_bits(call(model, batch), before)
    revert_patch(copied)
    assert_fused(model)
    trls = with_head(tiny_model("gemma2"))
    trls.load_state_dict(copied.state_dict())
    assert_same_bits(call(copied, batch), call(trls, batch))
