"""Each cell of the matrix of ``support_cases``, with a model of each family: fused or not, as
the matrix says, with the numbers of the same trainer on logits.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from support_cases import HEADS, MODELS, TRAINERS, make_model, outcome
from trl_models import MARKS, assert_fused, assert_same, in_float64

from liger_patch import patch_status

pytest.importorskip("accelerate")
pytest.importorskip("peft")

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings(
        "ignore:Model (has|with) .tie_word_embeddings:UserWarning",
        "ignore:Could not find a config file in:UserWarning",
    ),
]
CLOCK = ("runtime", "_per_second", "step_time")


def cells() -> list[Any]:
    """The quick ones meet every trainer, head and family once or more."""
    families, heads = itertools.cycle(MODELS), itertools.cycle(HEADS)
    quick = {(trainer, next(heads), next(families)) for trainer in TRAINERS}
    return [
        pytest.param(*cell, id="-".join(cell), marks=() if cell in quick else pytest.mark.slow)
        for cell in itertools.product(TRAINERS, HEADS, MODELS)
    ]


def numbers(trainer: Any) -> dict[str, Any]:
    """What each step logs, and the weights that it leaves."""
    before = {name: values.detach().clone() for name, values in trainer.model.named_parameters()}
    losses = trainer.train()
    logged = [{"loss": loss} for loss in losses] if isinstance(losses, list) else []
    logged = logged or trainer.state.log_history
    moved = {
        name: values.detach() - before[name]
        for name, values in trainer.model.named_parameters()
        if values.requires_grad
    }
    found = {
        f"{i} {name}": torch.tensor(value, dtype=torch.float64)
        for i, entry in enumerate(logged)
        for name, value in entry.items()
        if not name.endswith(CLOCK)
    }
    assert any(name.endswith(" loss") for name in found)
    return {**found, **moved}


@pytest.mark.parametrize(("trainer", "head", "family"), cells())
def test_every_cell_is_what_the_table_says(
    trainer: str,
    head: str,
    family: str,
    reads: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = HEADS[head]

    def train() -> tuple[Any, dict[str, Any]]:
        model = make_model(family, kind)
        made = TRAINERS[trainer](model, tmp_path, lambda: make_model(family, kind, seed=1))
        torch.manual_seed(0)  # of samples
        with in_float64():
            return made, numbers(made)

    expected = outcome(trainer, kind)
    if expected == "TRL refuses":
        with pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
            train()
        return
    if expected == "logits":
        # of ORPO and CPO, TRL's own code takes logits
        otherwise = "computes ordinary logits|leaves the head to TRL"
        with pytest.warns(UserWarning, match=f"liger_patch ({otherwise})"):
            made, ours = train()
        assert patch_status(made.model).fused is False
    else:
        made, ours = train()
        assert reads == []
        assert_fused(made.model)
    of_head = ("lm_head", "embed_tokens")  # which is the head where it is tied
    trained = [v for n, v in ours.items() if "lora_B" in n or any(x in n for x in of_head)]
    assert any(values.any() for values in trained)
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    _, on_logits = train()
    if trainer == "RLOO":  # its advantages add up to 0: of the loss only gradients are left
        ours, on_logits = (
            {name: value for name, value in each.items() if not name.endswith("loss")}
            for each in (ours, on_logits)
        )
    assert_same(ours, on_logits)
