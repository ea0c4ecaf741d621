"""Warnings of packed rows that the model or the caller does not take for what they are: once, with
what to change, and only where it is so.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from packed_samples import make_model, make_samples, positions_only, truth_of
from tiny_models import tiny_model
from training_step import call, patched, step

from liger_patch.patch.packing import positions_restart, why_sequences_mix

ASKS_LAYERS = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"),
    reason="before Transformers 5.17, recurrent layers take no keywords",
)


def test_counted_labels_that_are_left_out_are_said_once() -> None:
    model, samples = make_model(), make_samples(9, 4, prompts=False)
    batch = positions_only(samples)
    batch["labels"] = batch["input_ids"].clone()
    with patched(model):
        with pytest.warns(UserWarning, match="leaves out labels that num_items_in_batch counts"):
            call(model, batch, num_items_in_batch=12)
        call(model, batch, num_items_in_batch=12)


def moves_the_last(model: Any, batch: dict[str, Any], length: int, **options: Any) -> bool:
    """Whether the last sequence's logits change with the tokens before it."""
    changed = batch | {"input_ids": batch["input_ids"].clone()}
    changed["input_ids"][:, :-length] = batch["input_ids"][:, :-length].flip(-1)
    with torch.no_grad():
        ours, others = (model(**each, **options).logits[:, -length:] for each in (batch, changed))
    return not torch.allclose(ours, others, atol=1e-6)


@pytest.mark.parametrize(
    ("model_type", "options", "advice"),
    [
        ("llama", {"use_cache": False}, ""),
        ("llama", {}, "pass use_cache=False"),
        ("llama", {"use_cache": False, "attention_mask": torch.ones(1, 13)}, "leave it out"),
        ("qwen3_next", {"use_cache": False}, "recurrent layers"),
        ("gpt2", {"use_cache": False}, ""),
        ("bert", {"use_cache": False}, "masks of attention"),  # made in a method of its own
    ],
)
def test_packed_rows_that_see_one_another_are_said_once(
    model_type: str, options: dict[str, Any], advice: str
) -> None:
    """And only where the last sequence moves when another is changed."""
    model, samples = tiny_model(model_type), make_samples(9, 4, prompts=False)
    batch = positions_only(samples)
    assert moves_the_last(model.eval(), batch, 4, **options) == bool(advice)
    with patched(model, layers=False), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model(**batch, **options)
    said = [str(each.message) for each in said if "see one another" in str(each.message)]
    assert [advice in each for each in said] == [True] * bool(advice)


def test_positions_of_three_rows_want_those_of_the_text() -> None:
    model, shape = make_model(), torch.Size((1, 8))
    text = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    rows = {"position_ids": text.expand(3, 1, -1)}
    assert positions_restart(rows, shape)
    assert "4th row" in (why_sequences_mix(model, rows) or "")
    rows = {"position_ids": text.expand(4, 1, -1)}
    assert positions_restart(rows, shape)
    assert why_sequences_mix(model, rows) is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_of_padding_are_no_restart(side: str) -> None:
    """In Qwen2-VL's they are 1; all tokens of an image have one position."""
    image, mask = torch.tensor([[0, 1, 1, 1, 2, 3, 1, 1]]), torch.tensor([[1] * 6 + [0] * 2])
    if side == "left":
        image, mask = image.roll(2), mask.roll(2)
    rows = {"position_ids": image.expand(3, 1, -1), "attention_mask": mask}
    assert not positions_restart(rows, image.shape)
    assert positions_restart({"position_ids": image.expand(3, 1, -1)}, image.shape)


def test_packed_rows_behind_plain_ones_are_said() -> None:
    model = make_model()
    plain, packed = positions_only(make_samples(9)), positions_only(make_samples(9, 4))
    with patched(model):
        call(model, plain, use_cache=True)
        with pytest.warns(UserWarning, match="see one another"):
            call(model, packed, use_cache=True)


@pytest.mark.parametrize("by", ["checkpoints", "a mask"])
def test_rows_that_are_kept_apart_are_not_said(by: str) -> None:
    """Beside checkpoints Transformers has no cache; a caller's own mask is no affair of ours."""
    model, batch = make_model().train(), positions_only(make_samples(9, 4))
    if by == "checkpoints":
        model.gradient_checkpointing_enable()
    else:
        blocks = torch.block_diag(torch.ones(9, 9), torch.ones(4, 4)).tril()
        batch["attention_mask"] = blocks[None, None].bool()
    with patched(model):
        call(model, batch, use_cache=True)  # an error, if it warned


@ASKS_LAYERS
@pytest.mark.parametrize(
    ("name", "layers", "says"),
    [
        ("qwen3_next", False, r"\(Qwen3NextGatedDeltaNet\) .*: name \"recurrent\" in layers"),
        ("qwen3_next", ["delta_net"], r"\(Qwen3NextGatedDeltaNet\) .*: name \"recurrent\""),
        ("jamba", True, r"\(JambaMambaMixer\) .*: do not pack rows"),
        ("minimax", True, r"\(MiniMaxLightningAttention\) .*: do not pack rows"),
        ("granitemoehybrid", True, "masks of attention are made without them: do not pack rows"),
        ("gpt_oss", True, "masks of attention are made without them: do not pack rows"),
    ],
)
def test_sequences_that_are_not_kept_apart_are_said(name: str, layers: Any, says: str) -> None:
    """And only where they are not."""
    model, samples = make_model(name), make_samples(9, 4)
    batch, truth = positions_only(samples), truth_of(model, samples)
    with (
        patched(model, layers=layers),
        pytest.warns(UserWarning, match=f"see one another: .*{says}"),
    ):
        ours = step(model, batch)
    assert not torch.allclose(ours["loss"], truth["loss"])


@ASKS_LAYERS
@pytest.mark.parametrize("name", ["jamba", "minimax"])
def test_models_that_drop_seq_idx_are_said(name: str) -> None:
    batch = positions_only(make_samples(9, 4))
    batch["seq_idx"] = (batch["position_ids"] == 0).long().cumsum(1)
    with (
        patched(make_model(name)) as model,
        pytest.warns(UserWarning, match="see one another"),
    ):
        call(model, batch)
