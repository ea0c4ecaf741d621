"""Rows that begin alike share that prefix: losses and gradients are those of the padded batch, and
the backbone sees each prefix once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_models import SIZES, WARNINGS, Calls, configured, make_model, rows_of
from attention_models import served_calls as served_calls
from rows import every_row
from rows import model_type as row_name
from slow_cases import pairwise
from tiny_models import tiny_batch, tiny_model
from torch import Tensor, nn
from training_step import assert_right, call, in_float64, step, widened, with_checkpoints

from liger_patch import apply_patch, registry
from liger_patch.layers import masked_attention, unpadded
from liger_patch.layers.prefixes import Group, PutBack, in_one_row

pytestmark = WARNINGS
EXACT: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12}
# rows: a prompt of a token a letter, and how many tokens follow; the tokens that the backbone sees
BATCHES: dict[str, tuple[list[tuple[str, int]], int]] = {
    "pairs": ([("aaaaaa", 4), ("bbbbbbbbb", 7), ("aaaaaa", 5), ("bbbbbbbbb", 2)], 33),
    "groups": ([("aaaaaaa", 4), ("aaaaaaa", 1), ("aaaaaaa", 9), ("bbb", 2), ("bbb", 6)], 32),
    "scattered": ([("aaaaaaa", 4), ("bbb", 2), ("aaaaaaa", 1), ("bbb", 6), ("cc", 3)], 28),
    "a prompt that another one continues": (
        [("aaaaaaaa", 3), ("aaaaaaaabbbb", 4), ("aaaaaaaa", 2), ("aaaaaaaabbbb", 1)],
        26,
    ),
    "a system prompt": ([("ssaaaaaa", 3), ("ssaaaaaa", 4), ("ssbbbbb", 2), ("ssbbbbb", 5)], 29),
    # all but one token of the shorter row
    "equal rows": ([("aaaaaaaaaa", 0), ("aaaaaaaaaa", 0), ("bbbbb", 0), ("bbbbb", 6)], 23),
    "an empty completion": ([("aaaaaaa", 0), ("aaaaaaa", 5), ("bbb", 2), ("bbb", 0)], 19),
    "one alone, and an empty row": (
        [("aaaaaaa", 3), ("aaaaaaa", 5), ("cccc", 6), ("", 0), ("d", 1)],
        27,
    ),
    "what saves most": ([("aaabbc", 3), ("aaabb", 4), ("aaa", 2), ("aaabbc", 2)], 21),
}


def make_batch(
    rows: list[tuple[str, int]], *, left: bool = False, all_used: bool = False
) -> dict[str, Tensor]:
    """Return a padded batch of such rows. Labels are those of completions, or of all tokens."""
    generator = torch.Generator().manual_seed(3)
    shape = len(rows), max(len(prompt) + completion for prompt, completion in rows) + 2
    completions = torch.randint(40, SIZES["vocab_size"], shape, generator=generator)
    batch = {"input_ids": torch.zeros(shape).long(), "labels": torch.full(shape, -100)}
    batch["attention_mask"] = torch.zeros(shape).long()
    for row, (prompt, completion) in enumerate(rows):
        letters = torch.tensor([ord(each) - 90 + i for i, each in enumerate(prompt)]).long()
        ids = torch.cat([letters, completions[row, :completion]])
        start = shape[1] - len(ids) if left else 0
        unused = 1 if all_used else len(prompt)
        batch["input_ids"][row, start : start + len(ids)] = ids
        batch["attention_mask"][row, start : start + len(ids)] = 1
        batch["labels"][row, start + unused : start + len(ids)] = ids[unused:]
    return batch


@pytest.mark.parametrize(
    ("kind", "checkpointing", "all_used", "left"),
    pairwise(BATCHES, [None, True, False], [False, True], [False, True]),
)
def test_a_step_is_exact_in_float64(
    kind: str, left: bool, all_used: bool, checkpointing: bool | None, calls: Calls
) -> None:
    rows, tokens = BATCHES[kind]
    batch = make_batch(rows, left=left, all_used=all_used)
    model = widened(make_model("llama"))
    own = step(model, batch)
    with_checkpoints(model, checkpointing)
    assert own["model.embed_tokens.weight"] is not None
    shapes = rows_of(model)
    apply_patch(model, layers=["attention"])
    calls.own.clear()
    calls.flash.clear()
    with in_float64():
        ours = step(model, batch)
    assert {*shapes} == {(1, tokens)}
    assert calls.own == calls.flash == []
    torch.testing.assert_close(ours, own, **EXACT)
    with torch.no_grad():
        logits = torch.as_tensor(call(model.eval(), batch).logits)
    assert logits.shape == (*batch["input_ids"].shape, SIZES["vocab_size"])
    assert not logits[batch["attention_mask"] == 0].any()


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "mistral"])
def test_autocast_to_16_bits_is_no_worse(model_type: str, calls: Calls) -> None:
    model, batch = make_model(model_type), make_batch([("aaa", 4), ("aaa", 9), ("bbbb", 5)] * 2)
    batch["input_ids"][3:] = batch["input_ids"][:3]  # six rows share two prompts
    truth, own = step(widened(model), batch), step(model, batch, autocast=True)
    model.config.sliding_window = SIZES["vocab_size"]
    shapes = rows_of(model)
    apply_patch(model, layers=["attention"])
    assert_right(step(model, batch, autocast=True), own, truth, torch.bfloat16)
    assert shapes[0][1] < int(batch["attention_mask"].sum())


ALONE: dict[str, Callable[[Any, pytest.MonkeyPatch], None]] = {
    "dropout": lambda model, _: setattr(model.model.layers[0].mlp, "drop", nn.Dropout(0.1)),
    "dropout by the configuration": configured(resid_pdrop=0.1),
    "noise of a router": configured(router_jitter_noise=0.1),
    "a window that hides tokens": configured(
        sliding_window=12, layer_types=["sliding_attention"] * 2
    ),
    "a padded log-sum-exp, as of torch 2.6": lambda _, patch: patch.setattr(
        unpadded, "has_lse_of_tokens", lambda: False
    ),
    "an attention without kernels": lambda model, _: setattr(
        model.model.layers[0].self_attn,
        "__class__",
        type(make_model("llama").model.layers[0].self_attn),
    ),
}


@pytest.mark.parametrize("kind", ALONE)
def test_other_calls_compute_each_row(
    kind: str, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without padding still; in evaluation, nothing is drawn, and prefixes are shared."""
    model = apply_patch(make_model("llama"), layers=["attention"])
    batch = make_batch([("aaaaaaa", 3), ("aaaaaaa", 9), ("bbb", 1)])
    ALONE[kind](model, monkeypatch)
    shapes = rows_of(model)
    model(**batch)
    model.eval()
    model(**batch)
    draws = any(word in kind for word in ("dropout", "noise"))
    assert shapes == [(1, 30), (1, 23 if draws else 30)]


def test_attention_without_flash_attention_gets_the_mask(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masked_attention, "serves_flash_attention", lambda *_: False)
    model, batch = widened(make_model("llama")), make_batch(BATCHES["scattered"][0])
    own = step(model, batch)
    shapes = rows_of(model)
    apply_patch(model, layers=["attention"])
    calls.own.clear()
    torch.testing.assert_close(step(model, batch), own, **EXACT)
    assert shapes == [(1, BATCHES["scattered"][1])]
    assert calls.own == [True, True]


def test_little_in_common_is_not_shared(calls: Calls) -> None:
    model = apply_patch(make_model("llama"), layers=["attention"])
    batch = make_batch([("a", 30), ("a", 20), ("b", 9)])
    shapes = rows_of(model)
    model(**batch)
    assert shapes == [(1, 62)]


SHARE = "gemma3_text", "llama", "qwen2", "qwen3", "qwen3_moe"  # of those that every test runs on


@pytest.mark.parametrize("row", every_row(), ids=row_name)
def test_every_architecture_shares_or_computes_each_row(
    row: registry.Architecture, calls: Calls
) -> None:
    model = widened(tiny_model(row)).eval()  # some have dropout
    if model.config.is_encoder_decoder or model.config._attn_implementation != "sdpa":
        pytest.skip("it shares nothing")
    model.config.get_text_config().use_cache = False
    batch = tiny_batch(model, batch=4)
    batch["input_ids"][1, :5] = batch["input_ids"][0, :5]
    batch["input_ids"][2, :7] = batch["input_ids"][3, :7]
    own = step(model, batch)
    shapes = rows_of(model) if row.model_type in SHARE else []
    torch.testing.assert_close(step(apply_patch(model), batch), own, rtol=1e-9, atol=1e-9)
    assert all(tokens < batch["attention_mask"].sum() for _, tokens in shapes)


def test_a_second_derivative_is_an_error() -> None:
    row = in_one_row([1, 0], [2, 2], 3, [Group(1, [0, 1])], torch.device("cpu"))
    hidden = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(PutBack.apply(hidden, row, 6).sum(), hidden, create_graph=True)
