"""Projections of long rows keep the input of the norm before them, and compute the norm again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_same_bits
from tiny_models import tiny_batch
from torch import Tensor
from torch.utils import checkpoint
from training_step import with_checkpoints

from liger_patch import apply_patch
from liger_patch.kernels import rms_norm
from liger_patch.layers import checks, long_rows, lora

pytestmark = pytest.mark.skipif(
    checks.TOP_HOOKS is None, reason="torch 2.6 does not tell its hooks"
)


@pytest.fixture(autouse=True)
def every_row_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_rows, "LONG_INPUT_BYTES", 0)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
def test_projections_of_a_norm_keep_its_input(
    model_type: str,
    reentrant: bool,
    monkeypatch: pytest.MonkeyPatch,
    record: Callable[..., list[Any]],
) -> None:
    """And give the bits of those that keep the norm."""
    lora_models = pytest.importorskip("lora_models", reason="peft is not installed")
    results, norms = [], record(rms_norm.NormInputs, "norm")
    noted = record(lora, "run_lora_linears", lambda *args: args[3] is not None)
    for least in (2**40, 0):
        monkeypatch.setattr(long_rows, "LONG_INPUT_BYTES", least)
        noted.clear()
        norms.clear()
        model = apply_patch(lora_models.adapted(model_type, dtype=torch.bfloat16))
        with_checkpoints(model, reentrant)
        batch = tiny_batch(model.get_base_model())
        results.append(lora_models.training_step(model, batch, autocast=True))
        # queries, keys and values of two layers, once more in the backward pass
        expected = (2 if reentrant else 4, 2) if least == 0 else (0, 0)
        assert (sum(noted), len(norms)) == expected
    assert_same_bits(*results)


CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "nothing": lambda x, y: None,
    "the input": lambda x, y: x.add_(1),
    "the norm": lambda x, y: y.add_(1),
}


def test_norms_of_queries_and_keys_are_not_noted() -> None:
    """No projection is behind them: a note would only keep what they are the norm of."""

    def layer(x: Tensor) -> Tensor:
        y = rms_norm.rms_norm(x, None, 1e-6)
        long_rows.note_source(y, x, None, 1e-6, 0.0, x.dtype)
        assert long_rows.source_of(y) is None
        return y.sum()

    x = torch.randn(1, 3, 2, 8, requires_grad=True)
    checkpoint.checkpoint(layer, x, use_reentrant=False).backward()


@pytest.mark.parametrize("which", CHANGES)
def test_a_norm_that_has_changed_is_kept(which: str) -> None:
    """It is no longer what its source says."""
    weight, found = torch.linspace(1.0, 2.0, 8), []

    def layer(x: Tensor) -> Tensor:
        x = x * 2.0
        y = rms_norm.rms_norm(x, weight, 1e-6)
        long_rows.note_source(y, x, weight, 1e-6, 0.0, x.dtype)
        with torch.no_grad():
            CHANGES[which](x, y)
        found.append((long_rows.source_of(y), y.detach()))
        return y.sum()

    checkpoint.checkpoint(layer, torch.randn(3, 8, requires_grad=True), use_reentrant=False)
    ((source, y),) = found
    assert (source is None) == (which != "nothing")
    if source is not None:
        assert torch.equal(source.norm(), y)
