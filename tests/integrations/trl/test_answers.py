"""Trainers of answers to prompts: TRL's own numbers and weights. GRPO and RLOO, whose loss
multiplies log-probabilities by advantages, take three matrix products of a trained head where TRL's
takes four; each prompt runs once, also DPO's, in padded batches.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_models import Calls
from slow_cases import slow_but
from tiny_text import Writer
from training_step import assert_fused
from trl_models import MARKS, apply_trl_patch, assert_same, make_trainer, train

from liger_patch.kernels import linear_log_probs as operator
from liger_patch.layers import unpadded
from liger_patch.layers.prefixes import OneRow, in_one_row

pytestmark = MARKS
UPDATES = 3
WEIGHED = "grpo", "sapo", "bnpo", "cispo", "dapo", "dr_grpo", "luspo"
OTHERS: list[dict[str, Any]] = [  # options with which the loss is not known to be in proportion
    {"loss_type": "vespo"},
    {"beta": 0.1, "adapters": {"modules_to_save": ["lm_head"]}},
    {"off_policy_mask_threshold": 0.5},
    {"entropy_coef": 0.1},
]


@pytest.fixture
def passes(record: Callable[..., list[bool]]) -> list[bool]:
    """Whether each pass through a head's chunks has computed gradients."""
    return record(operator, "run_chunks", lambda *args, **_: any(args[3]))


def check(kind: str, folder: Path, passes: list[bool], **arguments: Any) -> tuple[Any, list[bool]]:
    """Train and evaluate as TRL does; all numbers, and the passes through chunks."""
    from datasets import Dataset

    writer = Writer()
    rows = [{"prompt": writer.words(3, 9)} for _ in range(12)]
    arguments["data"] = Dataset.from_list(rows)
    trls = train(make_trainer(kind, folder, None, **arguments))
    assert not passes
    trainer = make_trainer(kind, folder, True, **arguments)
    ours = train(trainer)
    assert_fused(trainer.model)
    torch.testing.assert_close(ours, trls, rtol=1e-9, atol=1e-12)
    return ours, passes


@pytest.mark.parametrize(
    ("loss_type", "how"),
    slow_but(
        [("dapo", {}), ("grpo", {"importance_sampling_level": "sequence"})],
        [*itertools.product(WEIGHED, [{}, {"importance_sampling_level": "sequence"}])],
    ),
)
def test_a_loss_by_advantages_takes_three_products(loss_type, how, tmp_path, passes) -> None:
    _, seen = check("GRPO", tmp_path, passes, loss_type=loss_type, **how)
    assert seen.count(True) == UPDATES
    assert not any(seen[seen.index(False) :])  # of the evaluation


@pytest.mark.parametrize("how", slow_but(OTHERS[1:2], OTHERS), ids=str)
def test_a_loss_of_no_known_proportion_takes_four(how, tmp_path, passes) -> None:
    _, seen = check("GRPO", tmp_path, passes, **how)
    assert seen.count(True) == UPDATES
    training = seen[: len(seen) - seen[::-1].index(True)]
    assert training.count(False) >= UPDATES


@pytest.mark.parametrize("kind", slow_but(["GRPO"], ["GRPO", "RLOO"]))
@pytest.mark.parametrize("accumulated", slow_but([1], [1, 2]))
def test_the_first_of_several_updates_takes_three(kind, accumulated, tmp_path, passes) -> None:
    """And clips nothing; the second does."""
    how = {"steps_per_generation": accumulated, "gradient_accumulation_steps": accumulated}
    how |= {"num_iterations": 2, "max_steps": 2, "learning_rate": 1.0}
    ours, seen = check(kind, tmp_path, passes, **how)
    assert [ours[f"{step} clip_ratio/region_mean"] > 0 for step in (1, 2)] == [False, True]
    old = [False] * accumulated
    assert seen[: 4 * accumulated] == [*old, *[True] * accumulated, *[False, True] * accumulated]


@pytest.mark.parametrize("kind", slow_but(["RLOO"], ["GRPO", "RLOO"]))
def test_other_bits_of_old_log_probabilities_change_no_number(
    kind, tmp_path, passes, monkeypatch
) -> None:
    """They may be of other batches. Then the next first update is not expected to have the same."""
    from liger_patch.integrations.trl_trainers import OfAdvantages

    scored = OfAdvantages._get_per_token_logps_and_entropies

    def rounded(self: Any, *arguments: Any, **named: Any) -> Any:
        log_probs, *others = scored(self, *arguments, **named)
        if not torch.is_grad_enabled():
            log_probs = log_probs * (1 + 1e-13)
        return log_probs, *others

    monkeypatch.setattr(OfAdvantages, "_get_per_token_logps_and_entropies", rounded)
    _, seen = check(kind, tmp_path, passes, num_iterations=2, max_steps=5)
    guessed, waited, old = [True, True], [False, True], [False]
    assert seen[:11] == [*old, *guessed, *waited, *old, *waited, *waited, *old, *waited][:11]


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


def trainer_of_samples(kind: str, folder: Path, adapters: bool, **how: Any) -> Any:
    data = samples()
    if kind != "DPO":
        data = data.select_columns(["prompt"])
        how["beta"] = 0.04 if adapters else 0.0
    lora = {} if adapters else None
    return make_trainer(kind, folder, None, data=data, adapters=lora, **how)


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
    how: dict[str, Any] = {}
    trls = train(trainer_of_samples(kind, tmp_path, adapters))
    if checkpointing is not None:
        how["gradient_checkpointing"] = True
        how["gradient_checkpointing_kwargs"] = {"use_reentrant": checkpointing}
    trainer = trainer_of_samples(kind, tmp_path, adapters, **how)
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
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
    trls = train(trainer_of_samples(kind, tmp_path, kind == "DPO", **how))
    trainer = trainer_of_samples(kind, tmp_path, kind == "DPO", **how)
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
