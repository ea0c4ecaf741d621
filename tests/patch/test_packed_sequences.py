"""Rows that hold several sequences train as the sequences do apart: no token predicts across a
boundary, and the average is that of the unpacked batch.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packed_samples import (
    IGNORED,
    MODEL_TYPES,
    PACKINGS,
    make_model,
    make_samples,
    packed_eagerly,
    padded,
    positions_only,
    truth_of,
)
from rows import every_row, model_type
from slow_cases import slow_but
from tiny_models import tiny_model
from torch import Tensor
from training_step import assert_right, call, patched, step

from liger_patch import patch_status, registry
from liger_patch.patch.forward import record_of
from liger_patch.patch.packing import rows_of_call, sequence_starts

# --- packed equals unpacked -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packing", "model_type"),
    slow_but(
        [*((each, "gemma2") for each in PACKINGS), *((positions_only, n) for n in MODEL_TYPES)],
        list(itertools.product(PACKINGS, MODEL_TYPES)),
    ),
)
def test_packed_trains_as_unpacked(packing: Callable, model_type: str) -> None:
    """Rotary embeddings take each token's own position."""
    model = make_model(model_type)
    samples = [*make_samples(9, 4), *make_samples(13, 6, prompts=False)]
    truth = truth_of(model, samples)
    with patched(model):
        packed, unpacked = (step(model, how(samples)) for how in (packing, padded))
        assert patch_status(model).fused
    torch.testing.assert_close(unpacked, truth)
    torch.testing.assert_close(packed, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_packed_trains_as_unpacked_on_a_gpu(model_type: str) -> None:
    model: Any = make_model(model_type)
    samples = make_samples(9, 4, 13, 6)
    truth = truth_of(model, samples)
    model.to("cuda", torch.float32)
    eager = packed_eagerly(model, samples)
    batch = {name: value.cuda() for name, value in positions_only(samples).items()}
    with patched(model, layers=True):
        ours = step(model, batch)
    eager, ours = ({n: None if v is None else v.cpu() for n, v in x.items()} for x in (eager, ours))
    assert_right(ours, eager, truth)


@pytest.mark.filterwarnings("ignore:liger_patch has no test of:UserWarning")
@pytest.mark.parametrize("model_type", ["llama", "custom"])
def test_a_separator_is_the_users_own_label(model_type: str) -> None:
    """The last token of a sequence is to predict it, and Trainer has counted it."""
    model, samples = make_model(), make_samples(9, 4, 13, 6, prompts=False)
    collator = transformers.DataCollatorWithFlattening(separator_id=5)
    batch = collator([{"input_ids": each["input_ids"]} for each in samples])
    batch["num_items_in_batch"] = (batch["labels"][:, 1:] != IGNORED).sum()
    truth = call(model, batch).loss
    with patched(model):
        record_of(model).tested = model_type == "llama"
        record_of(model).compared = "nothing"
        torch.testing.assert_close(call(model, batch).loss, truth)


def test_sequences_without_a_supervised_token_do_not_count() -> None:
    model, samples = make_model(), make_samples(9, 4, 13, 6, 1)
    samples[1]["labels"] = [IGNORED] * 4
    truth = truth_of(model, samples)
    with patched(model):
        torch.testing.assert_close(step(model, positions_only(samples)), truth)


@pytest.mark.parametrize("row", every_row(), ids=model_type)
@pytest.mark.filterwarnings("ignore:liger_patch computes ordinary logits:UserWarning")
@pytest.mark.filterwarnings("ignore:liger_patch packed .* recurrent layers:UserWarning")
@pytest.mark.filterwarnings("ignore:liger_patch packed sequences see one another:UserWarning")
def test_no_model_predicts_across_a_boundary(row: registry.Architecture) -> None:
    """Models that compute their own loss are among them."""
    model, samples = tiny_model(row).eval(), make_samples(9, 4, prompts=False)
    if model.config.is_encoder_decoder:
        pytest.skip("an encoder-decoder model has no packed rows, and does not shift its labels")
    batch = positions_only(samples)
    with patched(model):
        left_in = model(**batch, use_cache=False).loss
        batch["labels"][batch["position_ids"] == 0] = IGNORED
        torch.testing.assert_close(model(**batch, use_cache=False).loss, left_in)


def test_a_loss_function_of_the_users_sees_no_label_of_another_sequence() -> None:
    model, seen = make_model(), []
    batch = positions_only(make_samples(9, 4, prompts=False))

    def loss_function(logits: Tensor, labels: Tensor, **others: Any) -> Tensor:
        seen.append(labels)
        return logits.sum() * 0

    model.loss_function = loss_function
    with patched(model), pytest.warns(UserWarning, match="a loss of its own"):
        call(model, batch)
    assert seen[0].eq(IGNORED).nonzero().tolist() == [[0, 9]]  # a row's first is behind none


def test_positional_arguments_are_packed_too_and_surplus_ones_are_the_models_error() -> None:
    model, batch = make_model(), positions_only(make_samples(9, 4, prompts=False))
    names = list(inspect.signature(model.forward).parameters)
    places = names[: names.index("labels") + 1]
    batch["labels"] = batch["input_ids"]  # one tensor in two places
    arguments = [batch.get(name) for name in places]
    with patched(model):
        torch.testing.assert_close(model(*arguments).loss, call(model, batch).loss)
        with pytest.raises(TypeError, match="positional arguments"):
            model(*arguments, *[None] * 9)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_compiled")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")
def test_a_compiled_model_packs_too() -> None:
    model, samples = make_model().float(), make_samples(9, 4, 13, 6)
    with patched(model, layers=False):
        expected = model(**positions_only(samples)).loss
        compiled: Any = torch.compile(model, backend="eager", dynamic=False)
        loss = compiled(**positions_only(samples)).loss
    torch.testing.assert_close(loss, expected)


# --- what says where sequences begin --------------------------------------------------------------


def starts_of(length: int, **arguments: Any) -> list[int] | None:
    starts = sequence_starts(torch.Size((1, length)), arguments)
    return None if starts is None else starts[0].nonzero()[:, 0].tolist()


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0]])
RIGHT_PADDED = torch.tensor([[1, 1, 1, 1, 1, 0]])
LEFT_POSITIONS = torch.tensor([[1, 0, 1, 2, 3, 4]])  # as Transformers counts them from a mask


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, None),
        ({"position_ids": torch.arange(6)[None]}, [0]),
        ({"position_ids": POSITIONS}, [0, 3, 5]),
        ({"position_ids": POSITIONS + 2}, [0, 3, 5]),
        ({"position_ids": POSITIONS, "attention_mask": torch.ones(1, 6)}, [0, 3, 5]),
        ({"position_ids": POSITIONS, "attention_mask": RIGHT_PADDED}, [0, 3]),
        (
            {"position_ids": POSITIONS, "attention_mask": torch.tensor([[1, 1, 0, 0, 1, 1]])},
            [0, 4, 5],
        ),
        ({"position_ids": POSITIONS, "attention_mask": torch.zeros(1, 6)}, [0]),
        ({"position_ids": POSITIONS * 0}, [0]),
        ({"position_ids": POSITIONS * 0, "attention_mask": torch.ones(1, 6)}, [0]),
        ({"position_ids": LEFT_POSITIONS, "attention_mask": RIGHT_PADDED.flip(1)}, [0]),
        ({"position_ids": POSITIONS, "attention_mask": torch.ones(1, 8)}, None),
        ({"position_ids": POSITIONS, "attention_mask": torch.zeros(1, 1, 6, 6)}, [0, 3, 5]),
        ({"position_ids": POSITIONS.expand(3, 1, 6)}, None),
        ({"position_ids": torch.stack([POSITIONS, *[POSITIONS * 0] * 3])}, [0, 3, 5]),
        ({"position_ids": POSITIONS[:, 1:]}, None),
        ({"position_ids": torch.tensor([[0, 2, 4, 100, 101, 102]])}, [0]),
        ({"position_ids": torch.tensor([[7, 8, 9, 3, 4, 0]])}, [0, 3, 5]),
        ({"seq_idx": torch.tensor([[0, 0, 1, 1, 1, 2]])}, [0, 2, 5]),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 6], dtype=torch.int32)}, [0, 2]),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4], dtype=torch.int32)}, [0, 2, 4]),
        ({"cu_seq_lens_q": torch.tensor([2, 9])}, [0, 2]),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 6]), "position_ids": POSITIONS}, [0, 2, 3, 5]),
    ],
)
def test_where_sequences_start(arguments: dict[str, Any], expected: list[int] | None) -> None:
    assert starts_of(6, **arguments) == expected


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("cu_seq_lens_q", [0, 3, 6], "list"),
        ("cu_seq_lens_q", torch.tensor([], dtype=torch.int64), r"torch.int64 \(0,\)"),
        ("cu_seq_lens_q", torch.tensor([[0, 3, 6]]), r"torch.int64 \(1, 3\)"),
        ("cu_seq_lens_q", torch.tensor([0.0, 3.0]), "torch.float32"),
        ("cu_seq_lens_q", torch.tensor([True, False]), "torch.bool"),
        ("seq_idx", [[0, 0, 1]], "list"),
        ("seq_idx", torch.tensor([0, 0, 1, 1, 1, 1]), r"torch.int64 \(6,\)"),
    ],
)
def test_what_says_nothing_of_the_sequences_is_an_error(name: str, value: Any, got: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*tensor .* got {got}"):
        starts_of(6, **{name: value})


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
