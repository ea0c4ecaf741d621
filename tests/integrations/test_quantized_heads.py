"""Heads that bitsandbytes holds in 4 or 8 bits: fused, read, verified, or fallen back."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from quantized_models import (
    MARKS,
    Checkpoint,
    bnb,
    dequantized,
    results,
    save_checkpoint,
    with_lora,
)
from tiny_models import tiny_batch
from torch import nn
from training_step import joined
from transformers import PreTrainedModel

from liger_patch import apply_patch, deferred_logits, distillation_loss, patch_status
from liger_patch.deferred import capture
from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.kernels import products

pytestmark = MARKS
FALLBACK = "liger_patch computes ordinary logits"


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return save_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


def with_quantized_head(model: PreTrainedModel, kind: str = "nf4") -> PreTrainedModel:
    """A copy of the model whose head alone is quantized."""
    model = copy.deepcopy(model)
    weight = model.lm_head.weight.detach().clone()
    if kind == "int8":
        head = bnb.nn.Linear8bitLt(*weight.shape[::-1], bias=False, has_fp16_weights=False)
        head.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        head = bnb.nn.Linear4bit(*weight.shape[::-1], bias=False, compute_dtype=weight.dtype)
        head.weight = bnb.nn.Params4bit(
            weight,
            requires_grad=False,
            quant_type=kind[:3],
            compress_statistics="double" in kind,
            # of the hidden size: bitsandbytes 0.50 takes wrong scales on some CPUs where it is not
            # a multiple of the blocks'
            blocksize=32,
        )
    model.lm_head = head.to("cpu")
    assert not model.lm_head.weight.is_floating_point()
    return model


@pytest.mark.parametrize("trained", ["whole backbone", "lora", "lora on the head"])
@pytest.mark.parametrize("kind", ["nf4", "fp4, double quantisation", "int8"])
def test_a_quantized_head_is_fused(
    checkpoint: Checkpoint, kind: str, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's 16-bit weight exists 16 rows at a time."""
    monkeypatch.setattr(products, "SLICE_BYTES", 16 * 2 * checkpoint.model.config.hidden_size)
    batch = tiny_batch(checkpoint.model)
    targets = ["q_proj", "lm_head"] if "head" in trained else ["q_proj", "v_proj"]

    def make() -> nn.Module:
        model = with_quantized_head(checkpoint.model, kind)
        return model if trained == "whole backbone" else with_lora(model, targets)

    eager_model, model = make(), apply_patch(make(), layers=False)  # the head alone
    eager, ours = results(eager_model, batch), results(model, batch)
    assert (patch_status(model).fused, patch_status(model).reason) == (True, None)
    assert any("lm_head" in name for name in ours) == ("head" in trained)
    truth = results(dequantized(eager_model), batch)
    truth, eager, ours = joined(truth, eager, ours)
    assert_no_worse(ours, eager, truth, torch.bfloat16)


@pytest.mark.filterwarnings("ignore:liger_patch computes the distillation:UserWarning")
def test_adapters_on_a_4_bit_head_are_distilled_from_it_alone(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "SLICE_BYTES", 16 * 2 * checkpoint.model.config.hidden_size)
    batch = tiny_batch(checkpoint.model)
    labels = batch.pop("labels")

    def distilled(model: Any) -> dict[str, Any]:
        with deferred_logits():
            outputs = model(**batch)
            with torch.no_grad(), model.disable_adapter():
                others = model(**batch)
        loss = distillation_loss(outputs, others, labels, divergence="jsd")
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        return {"loss": loss.detach(), **gradients}

    models = [with_lora(with_quantized_head(checkpoint.model), ["lm_head"]) for _ in range(2)]
    eager, ours = distilled(models[0]), distilled(apply_patch(models[1], layers=False))
    assert patch_status(models[1]).fused
    models[0].zero_grad()
    truth, eager, ours = joined(distilled(dequantized(models[0])), eager, ours)
    assert_no_worse(ours, eager, truth, torch.bfloat16)


def test_logits_of_a_4_bit_head_are_eagers(checkpoint: Checkpoint) -> None:
    model = with_quantized_head(checkpoint.model).train()
    batch = tiny_batch(model)
    expected = model(**batch).logits
    logits = apply_patch(model, layers=False)(**batch).logits
    assert isinstance(logits, DeferredLogits)
    assert torch.equal(logits + 0, expected)


def test_a_4_bit_head_under_autocast(checkpoint: Checkpoint) -> None:
    model = with_quantized_head(checkpoint.model)
    batch = tiny_batch(model)
    losses = []
    for patch in (False, True):
        if patch:
            apply_patch(model)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(**batch).loss)
    assert patch_status(model).fused
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0)


def test_a_4_bit_head_passes_verification(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGER_PATCH_VERIFY", "1")
    model = apply_patch(with_lora(with_quantized_head(checkpoint.model), ["lm_head"]))
    results(model, tiny_batch(model))
    assert patch_status(model).fused


def hooked(model: PreTrainedModel) -> PreTrainedModel:
    """The head's forward is another one, as with accelerate's hooks."""
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x)
    return model


def test_a_4_bit_head_with_another_forward_falls_back(checkpoint: Checkpoint) -> None:
    batch = tiny_batch(checkpoint.model)
    eager = results(hooked(with_quantized_head(checkpoint.model)), batch)
    model = apply_patch(hooked(with_quantized_head(checkpoint.model)), layers=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = results(model, batch)
        results(model, batch)
    (warning,) = [w for w in caught if FALLBACK in str(w.message)]
    assert "Linear4bit" in str(warning.message)
    status = patch_status(model)
    assert status.fused is False
    assert status.reason in str(warning.message)
    assert "Linear4bit" in str(status)
    assert_no_worse(ours, eager, eager, torch.bfloat16)


def test_a_4_bit_head_that_cannot_be_read_falls_back(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that bitsandbytes has packed for inference."""
    model = with_quantized_head(checkpoint.model)
    expected = results(model, tiny_batch(model))
    monkeypatch.setattr(capture, "quantized_weight", lambda *_: None)
    with pytest.warns(UserWarning, match="Linear4bit"):
        ours = results(apply_patch(model, layers=False), tiny_batch(model))
    assert patch_status(model).fused is False
    assert_no_worse(ours, expected, expected, torch.bfloat16)


def test_a_head_that_cannot_be_read_where_fusing_is_demanded_is_an_error(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = apply_patch(hooked(with_quantized_head(checkpoint.model)))
    monkeypatch.setenv("LIGER_PATCH_RETURN_LOGITS", "0")
    with pytest.raises(RuntimeError, match="Linear4bit"):
        model(**tiny_batch(model))
