"""Packed rows that the model or the caller does not take for what they are: one warning. And what
recurrent layers are told of the others.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from packed_samples import ROWS, make_model, make_samples, positions_only
from tiny_models import tiny_model
from training_step import call, patched

from liger_patch.patch.packed_rows import positions_restart, rows_of_call, why_sequences_mix


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
    ],
)
def test_packed_rows_that_see_one_another_are_said_once(
    model_type: str, options: dict[str, Any], advice: str
) -> None:
    """And only where the last sequence moves when another is changed."""
    model, samples = tiny_model(ROWS[model_type]), make_samples(9, 4, prompts=False)
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


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
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


IDS, POSITIONS = torch.zeros(2, 6, dtype=torch.int64), torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)
LEFT_POSITIONS = torch.tensor([[-1, -1, 0, 1, 2, 3]])
PADDED = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("arguments", "lengths"),
    [
        ({"position_ids": POSITIONS}, [3, 3, 3, 3]),
        ({"position_ids": POSITIONS[:1]}, [3, 3, 3, 3]),
        ({"position_ids": POSITIONS, "attention_mask": PADDED}, [3, 2]),
        ({"position_ids": POSITIONS, "attention_mask": torch.zeros(2, 1, 6, 6)}, [3, 3, 3, 3]),
        ({"position_ids": POSITIONS, "inputs_embeds": IDS[..., None], "input_ids": None}, [3] * 4),
        ({"seq_idx": torch.zeros_like(IDS)}, [6, 6]),  # own code without kernels would raise
        ({"cu_seq_lens_q": torch.tensor([0, 6, 10, 12])}, [6, 4, 2]),
        ({}, None),
        ({"position_ids": torch.arange(6)[None]}, None),
        ({"position_ids": LEFT_POSITIONS, "attention_mask": (LEFT_POSITIONS >= 0).long()}, None),
        ({"position_ids": POSITIONS, "attention_mask": PADDED * 0, "seq_idx": IDS}, None),
        ({"position_ids": POSITIONS, "attention_mask": {"a": IDS}, "past_key_values": 1}, None),
        ({"position_ids": POSITIONS.to("meta"), "input_ids": IDS.to("meta")}, None),
        ({"position_ids": POSITIONS[:, :1], "input_ids": IDS[:, :1]}, None),
    ],
)
def test_sequences_of_a_call(arguments: dict[str, Any], lengths: list[int] | None) -> None:
    rows = rows_of_call({"input_ids": IDS, **arguments})
    assert (None if rows is None else rows.lengths.tolist()) == lengths
