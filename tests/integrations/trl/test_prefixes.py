"""DPO and GRPO with each prompt once: TRL's own numbers and weights, of padded batches."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import trl_models
from attention_models import Calls
from slow_cases import slow_but
from tiny_text import Writer
from training_step import assert_fused
from trl_models import MARKS, apply_trl_patch, assert_same, train

from liger_patch.layers import unpadded
from liger_patch.layers.prefixes import OneRow, in_one_row

pytestmark = MARKS


def samples() -> Any:
    """Prompts of many lengths, of which one continues another; two answers that are alike, and one
    that is empty.
    """
    from datasets import Dataset

    writer, rows = Writer(), []
    for index in range(12):
        prompt = writer.words(6, 12)
        if index % 4 == 3:
            prompt = f"{rows[-1]['prompt']} {prompt}"
        chosen, rejected = writer.answer(), writer.answer()
        if index % 4 == 1:
            rejected = chosen
        if index % 4 == 2:
            rejected = ""
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return Dataset.from_list(rows)


def make_trainer(kind: str, folder: Path, adapters: bool, **how: Any) -> Any:
    data = samples()
    if kind != "DPO":
        data = data.select_columns(["prompt"])
        how["beta"] = 0.04 if adapters else 0.0
    lora = {} if adapters else None
    return trl_models.make_trainer(kind, folder, None, data=data, adapters=lora, **how)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Real tokens of each batch, and how many of them the backbone is given."""
    Calls(monkeypatch, served=True)
    found: list[tuple[int, int]] = []

    def counted(starts: list[int], lengths: list[int], *others: Any) -> OneRow:
        row = in_one_row(starts, lengths, *others)
        found.append((sum(lengths), len(row.places)))
        return row

    monkeypatch.setattr(unpadded, "in_one_row", counted)
    return found


@pytest.mark.parametrize(
    ("kind", "adapters", "checkpointing"),
    slow_but(
        [("DPO", False, True), ("DPO", True, None), ("GRPO", True, False)],
        [*itertools.product(["DPO", "GRPO", "RLOO"], [False, True], [None, True, False])],
    ),
)
def test_each_prompt_runs_once_with_trls_numbers(
    kind: str,
    adapters: bool,
    checkpointing: bool | None,
    tmp_path: Path,
    seen: list[tuple[int, int]],
) -> None:
    trls = train(make_trainer(kind, tmp_path, adapters))
    how: dict[str, Any] = {}
    if checkpointing is not None:
        how["gradient_checkpointing"] = True
        how["gradient_checkpointing_kwargs"] = {"use_reentrant": checkpointing}
    trainer = make_trainer(kind, tmp_path, adapters, **how)
    models = [trainer.model, getattr(trainer, "ref_model", None)]
    for model in models:
        if model is not None:
            apply_trl_patch(model)
    ours = train(trainer)
    assert_fused(trainer.model)
    for name in ("1", "2", "3"):  # of equal answers, whose rewards differ by rounding
        for each in (ours, trls):
            each.pop(f"{name} rewards/accuracies", None)
    torch.testing.assert_close(ours, trls, rtol=1e-9, atol=1e-12)
    passes = 2 if kind == "DPO" or adapters else 1  # the reference's too
    assert len(seen) >= 3 * passes
    assert all(computed < real for real, computed in seen)
    logged = {"DPO": {"rewards/margins", "logps/chosen"}, "GRPO": {"reward_std", "entropy"}}
    logged["RLOO"] = logged["GRPO"]
    assert {f"3 {name}" for name in logged[kind]} <= ours.keys()


def share_of_even_words(completions: list[str], **_: Any) -> list[float]:
    numbers = [[int(word[1:]) for word in re.findall(r"w\d+", each)] for each in completions]
    return [sum(n % 2 == 0 for n in each) / max(len(each), 1) for each in numbers]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_a_hundred_steps_have_trls_curve(
    kind: str, tmp_path: Path, seen: list[tuple[int, int]]
) -> None:
    """In which the model learns: DPO's answers by heart, GRPO's reward."""
    how: dict[str, Any] = {"max_steps": 100, "optim": "adamw_torch", "learning_rate": 3e-3}
    how["rewards"] = share_of_even_words
    trls = train(make_trainer(kind, tmp_path, kind == "DPO", **how))
    trainer = make_trainer(kind, tmp_path, kind == "DPO", **how)
    apply_trl_patch(trainer.model)
    ours = train(trainer)
    assert_fused(trainer.model)
    assert len(seen) >= 100
    assert all(computed < real for real, computed in seen)
    for name in [name for name in trls if name.endswith("rewards/accuracies")]:
        for each in (ours, trls):  # of equal answers, whose rewards differ by rounding
            each.pop(name)
    assert_same(ours, trls)
    curve = "loss" if kind == "DPO" else "reward"
    first, last = (
        torch.stack([ours[f"{step} {curve}"] for step in steps]).mean()
        for steps in (range(1, 11), range(91, 101))
    )
    assert last < 0.7 * first if kind == "DPO" else last > 1.3 * first
