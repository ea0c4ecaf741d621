"""The environment variables: read at every forward pass, and never ignored."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_same_bits
from tiny_models import tiny_batch
from torch import Tensor
from training_step import assert_right, call, step, widened

from liger_patch import apply_patch, patch_status
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.kernels.head import logits as head_logits

FLAGS = ("LIGER_PATCH_RETURN_LOGITS", "LIGER_PATCH_CHUNK_MIB")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *itertools.product(FLAGS, ["yes", "true", "-1", "nan", "inf", " "]),
        *itertools.product(FLAGS[:1], ["2"]),  # 2 MiB is a budget
        ("LIGER_PATCH_CHUNK_MIB", "0"),
    ],
)
def test_an_unknown_value_is_an_error_that_names_the_flag(
    model: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    apply_patch(model)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"{name} must be .*{re.escape(repr(value))}"):
        call(model, tiny_batch(model))
    with pytest.raises(ValueError, match=name):
        patch_status(model)
    monkeypatch.delenv(name)
    call(model, tiny_batch(model))
    assert patch_status(model).fused


def test_an_unknown_variable_warns_once_and_names_the_closest(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGIT", "1")
    with pytest.warns(UserWarning, match=r"no LIGER_PATCH_RETURN_LOGIT: is LIGER_PATCH_RETURN_LOG"):
        apply_patch(model)
    apply_patch(model)  # without a warning: pytest makes an error of it
    monkeypatch.setenv("LIGER_PATCH_VERSION", "1")  # like none
    with pytest.warns(UserWarning, match=r"no LIGER_PATCH_VERSION$"):
        apply_patch(model)


def test_return_logits_is_read_at_every_forward(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_patch(model)
    batch = tiny_batch(model)
    for value, kind in [("1", Tensor), ("", DeferredLogits), ("1", Tensor), ("0", DeferredLogits)]:
        monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", value)
        assert type(call(model, batch).logits) is kind
        assert patch_status(model).fused is (kind is DeferredLogits)


def own_loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    return logits.float().square().mean() + 0.0 * labels.float().mean()


def test_a_loss_function_of_ones_own_is_called_on_the_logits(model: Any) -> None:
    model.loss_function = own_loss
    truth, eager = step(widened(model), tiny_batch(model)), step(model, tiny_batch(model))
    apply_patch(model)
    with pytest.warns(UserWarning, match="computes a loss of its own") as warned:
        ours = step(model, tiny_batch(model))
    assert len(warned) == 1
    assert model.loss_function is own_loss
    assert patch_status(model).fused is False
    assert_right(ours, eager, truth)


@pytest.mark.parametrize("flag", [None, "0.0005", "1000"])
def test_chunk_mib_of_the_environment_comes_before_the_argument(
    model: Any, monkeypatch: pytest.MonkeyPatch, record: Callable[..., list[int]], flag: str | None
) -> None:
    batch = tiny_batch(model)
    counts = record(head_logits, "cross_entropy_rows", lambda logits, *_, **__: len(logits))
    if flag is not None:
        monkeypatch.setenv("LIGER_PATCH_CHUNK_MIB", flag)
    apply_patch(model, chunk_mib=0.001 if flag == "1000" else 512)
    call(model, batch)
    supervised = (batch["labels"][:, 1:] != -100).sum().item()
    assert sum(counts) == supervised
    # a float32 row of 131 logits takes 524 bytes: one row in 0.0005 MiB
    assert len(counts) == (supervised if flag == "0.0005" else 1)


def test_ordinary_logits_give_eagers_loss_bit_for_bit_in_packed_rows(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a collator has left the label of a sequence's first token in."""
    batch = tiny_batch(model, ignored=0.0)
    del batch["attention_mask"]
    length = batch["input_ids"].shape[1]
    batch["labels"] = batch["input_ids"].clone()
    batch["position_ids"] = torch.cat([torch.arange(4), torch.arange(length - 4)]).expand(2, -1)
    model.config.use_cache = False
    eager = step(model, batch)
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "1")
    ours = step(apply_patch(model, layers=False), batch)
    assert_same_bits(ours, eager)
    monkeypatch.delenv("LIGER_PATCH_RETURN_LOGITS")
    assert not torch.equal(step(model, batch)["loss"], eager["loss"])
