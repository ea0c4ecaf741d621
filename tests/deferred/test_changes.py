"""Logits that are read after weights, hidden states or an index have changed: those of the forward
pass, or an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_group import run
from tiny_models import VOCAB_SIZE as V
from tiny_models import tiny_batch, tiny_model
from torch import nn
from training_step import call

from liger_patch import apply_patch


def optimizer_step(model: Any) -> None:
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    torch.optim.SGD([model.lm_head.weight], lr=0.1).step()


def fused_adam(model: Any) -> None:
    model(**tiny_batch(model)).loss.backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()


def new_data(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "optimizer": optimizer_step,
    "fused Adam": fused_adam,
    "new data": new_data,
    "written to": lambda model: model.lm_head.weight.detach()[0, 0].add_(1),
    "loaded": lambda model: model.lm_head.load_state_dict({"weight": torch.zeros(V, 32)}),
    "freed": lambda model: model.lm_head.weight.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_logits_of_a_head_that_has_changed_are_an_error(change: str, patched_model: Any) -> None:
    """Whether they are read, in whole or in part, or a loss is computed of them."""
    logits = call(patched_model, tiny_batch(patched_model)).logits
    rows, labels = logits[:, 1:] * 2, torch.zeros(18, dtype=torch.int64)
    CHANGES[change](patched_model)
    for use in (
        logits.sum,
        lambda: logits + 0,
        lambda: rows + 0,
        lambda: nn.functional.cross_entropy(logits.view(-1, V), labels),
    ):
        with pytest.raises(
            RuntimeError, match=r"the head's weight (changed|was freed) since the forward pass"
        ):
            use()
    assert logits.shape[-1] == rows.shape[-1] == V


def test_logits_read_before_the_head_changes_can_be_read_again(
    patched_model: Any, outputs: Any
) -> None:
    logits = outputs.logits
    expected = logits.detach().clone()
    optimizer_step(patched_model)
    assert torch.equal(logits, expected)


def test_logits_of_hidden_states_that_have_changed_are_an_error(patched_model: Any) -> None:
    outputs = call(patched_model, tiny_batch(patched_model), output_hidden_states=True)
    with torch.no_grad():
        outputs.hidden_states[-1].zero_()
    with pytest.raises(RuntimeError, match="hidden states changed since the forward pass"):
        outputs.logits + 0


def test_an_index_that_is_changed_later_chooses_what_it_chose() -> None:
    results = []
    for model in (tiny_model(), apply_patch(tiny_model())):
        logits = call(model, tiny_batch(model)).logits
        positions, mask = torch.tensor([1, 2]), torch.ones(logits.shape[:2], dtype=torch.bool)
        row: Any = torch.tensor(0)
        chosen = [logits[torch.arange(2), positions], logits[mask], logits[row], logits[:, row:]]
        positions += 1
        mask[0] = False
        row += 1
        shapes = [each.shape for each in chosen]
        read = [each + 0 for each in chosen]
        assert [each.shape for each in read] == shapes
        results.append(read)
    torch.testing.assert_close(results[1], results[0])


TRAINS_ONE_STEP = """
import sys, torch

model, batch, expected = torch.load(sys.argv[1], weights_only=False)
outputs = model(**batch)
torch.testing.assert_close(outputs.loss, expected)
outputs.loss.backward()
torch.optim.AdamW(model.parameters(), fused=True).step()
try:
    outputs.logits.sum()
except RuntimeError as error:
    sys.exit(0 if "weight changed" in str(error) else str(error))
sys.exit("logits of other weights were given")
"""


def test_a_saved_model_is_patched_and_sees_optimizers_in_another_process(
    patched_model: Any, tmp_path: Path
) -> None:
    """Also what no version counts: fused Adam, as bitsandbytes' optimizers, writes in C++."""
    script, file = tmp_path / "script.py", tmp_path / "model.pt"
    script.write_text(TRAINS_ONE_STEP)
    batch = tiny_batch(patched_model)
    torch.save((patched_model, batch, call(patched_model, batch).loss.detach()), file)
    run(str(script), str(file), processes=1)
