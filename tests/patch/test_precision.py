"""Autocast, loss scaling, and heads of another dtype than the rest: no worse than eager."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from tiny_models import Batch, tiny_batch, tiny_model
from torch import Tensor
from training_step import (
    Float64,
    Step,
    assert_right,
    call,
    gradients,
    joined,
    patched,
    step,
    widened,
)
from transformers import PreTrainedModel

from liger_patch import apply_patch, patch_status

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALVES = (torch.bfloat16, torch.float16)
SCALE = 1024.0  # a loss scale that overflows nowhere here
# of head and body
MIXTURES = list(itertools.permutations((torch.float32, *HALVES), 2))


def scaled_step(model: PreTrainedModel, batch: Batch) -> Step:
    """Under float16 autocast, with a loss scaler as in a training loop; gradients unscaled."""
    scaler = torch.amp.GradScaler(model.device.type, init_scale=SCALE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast(model.device.type, dtype=torch.float16):
        loss = call(model, batch).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    results = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    before = model.lm_head.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SCALE  # nothing was infinite
    assert not torch.equal(model.lm_head.weight, before)
    return {"loss": loss.detach(), **results}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_loss_scaler_trains_as_eager(model_type: str, device: str) -> None:
    eager_model, model = (tiny_model(model_type).to(device) for _ in range(2))
    batch = tiny_batch(model)
    truth = step(widened(model), batch)
    eager, ours = scaled_step(eager_model, batch), scaled_step(apply_patch(model), batch)
    assert patch_status(model).fused
    assert ours["loss"].dtype == eager["loss"].dtype
    assert_right(ours, eager, truth, torch.float16)


@pytest.mark.parametrize("device", DEVICES)
def test_a_loss_scale_keeps_every_gradient_that_float16_can_hold(device: str) -> None:
    model = tiny_model(dtype=torch.float16).to(device)
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0**-12)  # every word all but equally likely
    batch = tiny_batch(model)

    def gradient_of(model: PreTrainedModel, scale: float) -> Tensor:
        outputs = call(model, batch)
        with Float64() if model.dtype == torch.float64 else contextlib.nullcontext():
            return gradients(model, outputs.loss * scale)["lm_head.weight"]

    scale = 2.0**16
    seen = gradient_of(widened(model), scale).abs() >= torch.finfo(torch.float16).tiny
    eager, unscaled = gradient_of(model, scale), gradient_of(model, 1.0)
    ours = gradient_of(apply_patch(model), scale)
    assert patch_status(model).fused
    assert eager[seen].all()
    assert ours[seen].all()
    assert not unscaled[seen].all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", HALVES, ids=str)
@pytest.mark.parametrize(("head", "body"), MIXTURES, ids=str)
def test_a_head_of_another_dtype_under_autocast_is_no_worse_than_eager(
    head: torch.dtype, body: torch.dtype, autocast: torch.dtype, device: str
) -> None:
    model = tiny_model(dtype=body).to(device)
    model.lm_head.to(head)
    batch = tiny_batch(model)
    truth = step(widened(model), batch)

    def in_autocast() -> tuple[Step, torch.dtype]:
        with torch.autocast(device, dtype=autocast):
            outputs = call(model, batch)
        results = {"loss": outputs.loss.detach(), **gradients(model, outputs.loss)}
        return results, outputs.logits.dtype

    eager, eager_dtype = in_autocast()
    with patched(model):
        ours, dtype = in_autocast()
        assert patch_status(model).fused
    assert dtype == eager_dtype == autocast
    assert ours["loss"].dtype == eager["loss"].dtype
    truth, eager, ours = joined(truth, eager, ours)
    # the fewest bits on the way
    assert_no_worse(ours, eager, truth, max(autocast, body, head, key=lambda d: torch.finfo(d).eps))


@pytest.mark.parametrize(("head", "body"), MIXTURES, ids=str)
def test_a_head_of_another_dtype_outside_autocast_is_eagers_error(
    head: torch.dtype, body: torch.dtype
) -> None:
    errors: list[Any] = []
    for patch in (False, True):
        model = tiny_model(dtype=body)
        model.lm_head.to(head)
        if patch:
            apply_patch(model)
        with pytest.raises(RuntimeError, match="dtype") as raised:
            call(model, tiny_batch(model))
        errors.append(str(raised.value))
    assert errors[0] == errors[1]
