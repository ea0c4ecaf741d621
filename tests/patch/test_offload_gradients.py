"""Offloaded checkpoints of steps with dropout and autocast: the gradients of plain checkpoints, bit
for bit.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from offloaded_models import (
    KINDS,
    MARKS,
    assert_as_without,
    assert_same_bits,
    gradients,
    model_of,
    offloaded,
    step,
    tiny_batch_of,
)
from slow_cases import slow_but

from liger_patch import apply_patch, patch_status
from liger_patch.patch.forward import record_of
from liger_patch.patch.layer_input import PIECE_BYTES
from liger_patch.patch.offload import CheckpointOffload

pytestmark = MARKS


@pytest.mark.parametrize(
    ("reentrant", "autocast", "layers"),
    slow_but(
        [(False, False, False), (True, True, True), (False, True, True), (True, False, False)],
        list(itertools.product((False, True), repeat=3)),
    ),
)
def test_gradients_are_those_of_plain_checkpoints(
    reentrant: bool, autocast: bool, layers: bool
) -> None:
    """Of layers with dropout: each runs again with the random numbers that it had."""
    sizes = {"num_hidden_layers": 5}
    plain, model = (model_of(reentrant, **sizes) for _ in range(2))
    apply_patch(plain, layers=layers)
    offload = offloaded(model, layers=layers)
    for seed in (0, 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert_same_bits(step(model, seed), step(plain, seed))
    said = f"4 layer inputs, {4 * PIECE_BYTES / 2**20:g} MiB of host memory"
    assert str(offload) == said
    assert dict(patch_status(model).rows)["checkpoint offload"] == said


@KINDS
@pytest.mark.parametrize("autocast", [False, True])
def test_a_backward_pass_behind_a_forward_pass_under_autocast(
    autocast: bool, reentrant: bool
) -> None:
    """Layers run again under the autocast of their forward pass, also outside it, as in Trainer."""

    def run(model: Any) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**tiny_batch_of(model), use_cache=False).loss
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss.backward()

    assert_as_without(run, lambda: model_of(reentrant, num_hidden_layers=4))


@pytest.mark.gpu
@KINDS
def test_many_steps_with_dropout_on_a_gpu(reentrant: bool) -> None:
    """The host runs ahead by several steps, so that memory is used again while copies run."""
    results = []
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model: Any = model_of(reentrant, num_hidden_layers=6)
        model = apply_patch(model.to(torch.bfloat16))
        if is_offloaded:
            record = record_of(apply_patch(model, checkpoint_offload=True))
            assert record is not None
            record.offload = offload = CheckpointOffload(min_bytes=1)
        torch.manual_seed(0)
        ids = torch.randint(0, 64, (64, 512), device="cuda")
        for start in range(0, 64, 2):
            batch = ids[start : start + 2, : 512 - start]
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        results.append(gradients(model))
    assert str(offload).startswith("5 layer inputs")
    assert offload.host_bytes == 5 * PIECE_BYTES
    assert_same_bits(*results)
