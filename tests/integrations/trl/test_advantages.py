"""GRPO and RLOO, whose loss multiplies log-probabilities by advantages: TRL's own numbers and
weights, in three matrix products of a trained head where TRL's takes four.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow_but
from tiny_text import Writer
from training_step import assert_fused
from trl_models import MARKS, make_trainer, train

from liger_patch.kernels import linear_log_probs as operator

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


def check(
    kind: str, folder: Path, passes: list[bool], *, last: int = UPDATES, **arguments: Any
) -> tuple[Any, list[bool]]:
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
    assert f"{last} entropy" in ours
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
    ours, seen = check(kind, tmp_path, passes, last=2, **how)
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
    _, seen = check(kind, tmp_path, passes, last=5, num_iterations=2, max_steps=5)
    guessed, waited, old = [True, True], [False, True], [False]
    assert seen[:11] == [*old, *guessed, *waited, *old, *waited, *waited, *old, *waited][:11]
