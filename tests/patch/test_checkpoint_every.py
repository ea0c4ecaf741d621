"""Inputs of checkpointed layers that are computed again: the same gradients bit for bit, and less
memory.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from offloaded_models import (
    KINDS,
    MARKS,
    assert_same_bits,
    gradients,
    model_of,
    offloaded,
    step,
)
from slow_cases import slow_but
from torch import Tensor, nn

from liger_patch import apply_patch, patch_status, registry
from liger_patch.patch import offload as offload_module
from liger_patch.patch.forward import record_of
from liger_patch.patch.layer_input import PIECE_BYTES
from liger_patch.patch.offload import CheckpointOffload

pytestmark = MARKS

ROWS = {row.model_type: row for row in registry.available()}


@pytest.mark.parametrize(
    ("reentrant", "every", "autocast", "layers"),
    slow_but(
        [
            (False, 1, False, False),
            (True, 1, True, True),
            (False, 2, False, True),
            (True, 2, True, False),
            (False, 3, True, True),
            (True, 3, False, False),
            (False, 9, False, False),
            (True, 9, True, True),
        ],
        list(itertools.product((False, True), (1, 2, 3, 9), (False, True), (False, True))),
    ),
)
def test_gradients_are_those_of_plain_checkpoints(
    reentrant: bool, every: int, autocast: bool, layers: bool
) -> None:
    """Of layers with dropout: each runs again with the random numbers that it had."""
    sizes = {"num_hidden_layers": 5}
    plain, model = (model_of(reentrant, **sizes) for _ in range(2))
    apply_patch(plain, layers=layers)
    offload = offloaded(model, every=every, layers=layers)
    for seed in (0, 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert_same_bits(step(model, seed), step(plain, seed))
    kept = -(-5 // every)
    mib = (kept - 1) * PIECE_BYTES / 2**20
    said = f"{kept - 1} layer inputs, {mib:g} MiB of host memory"
    said += f", {5 - kept} computed again" if every > 1 else ""
    assert str(offload) == said
    assert dict(patch_status(model).rows)["checkpoint offload"] == said


@KINDS
def test_each_layer_runs_once_more_but_those_whose_result_is_kept(reentrant: bool) -> None:
    """In the forward pass, in the backward pass, and for the input of the next layer."""
    model = model_of(reentrant, num_hidden_layers=6)
    calls: list[int] = [0] * 6

    def counting(i: int, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[i] += 1
            return forward(*args, **kwargs)

        return call

    for i, layer in enumerate(model.model.layers):
        layer.mlp.forward = counting(i, layer.mlp.forward)
    offloaded(model, every=3, layers=False)
    step(model)
    assert calls == [3, 3, 2, 3, 3, 2]


class Changing(nn.Module):
    """Changes what the layers in front of it return, in place or not."""

    def __init__(self, layer: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = layer, in_place

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        result = self.layer(*args, **kwargs)
        return result.mul_(2) if self.in_place else result * 2


@KINDS
@pytest.mark.parametrize("in_place", [False, True])
def test_an_input_that_is_not_what_the_layer_before_returned_is_kept(
    reentrant: bool, in_place: bool
) -> None:
    steps = []
    for every in (1, 2):
        model = model_of(reentrant, num_hidden_layers=4)
        offload = offloaded(model, every=every)
        model.model.layers[0] = Changing(model.model.layers[0], in_place)
        steps.append(step(model))
    assert_same_bits(steps[1], steps[0])
    assert "2 layer inputs" in str(offload)
    assert str(offload).endswith("1 computed again")


@KINDS
def test_random_numbers_after_a_step_are_those_of_plain_checkpoints(reentrant: bool) -> None:
    drawn = []
    for every in (1, 2):
        offloaded(model := model_of(reentrant, num_hidden_layers=4), every=every)
        step(model)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_a_number_that_is_none(every: Any) -> None:
    with pytest.raises(ValueError, match="checkpoint_every must be a whole number >= 1, got"):
        apply_patch(model_of(), checkpoint_offload=True, checkpoint_every=every)


def test_it_is_for_offloaded_checkpoints() -> None:
    message = "checkpoint_every=2 needs checkpoint_offload, got checkpoint_offload=False"
    with pytest.raises(ValueError, match=message):
        apply_patch(model_of(), checkpoint_every=2)


def test_another_number_takes_effect() -> None:
    model = apply_patch(model_of(), checkpoint_offload=True)
    for every in (2, 3, 1):
        apply_patch(model, checkpoint_offload=True, checkpoint_every=every)
        record = record_of(model)
        assert record is not None
        assert record.offload is not None
        assert record.offload.every == every


def test_all_inputs_are_kept_in_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_module, "in_process_group", lambda: True)
    offload = offloaded(model := model_of(num_hidden_layers=4), every=2)
    with pytest.warns(UserWarning, match="computes no layer input again: in a process group"):
        step(model)
    assert str(offload).startswith("3 layer inputs")
    assert "again" not in str(offload)


@pytest.mark.gpu
@KINDS
def test_many_steps_with_dropout_on_a_gpu(reentrant: bool) -> None:
    """The host runs ahead by several steps, so that memory is used again while copies run."""
    results = []
    for every in (None, 1, 2, 3):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model: Any = model_of(reentrant, num_hidden_layers=6)
        model = model.to(torch.bfloat16)
        apply_patch(model)
        if every is not None:
            record = record_of(apply_patch(model, checkpoint_offload=True))
            assert record is not None
            record.offload = offload = CheckpointOffload(min_bytes=1, every=every)
        torch.manual_seed(0)
        ids = torch.randint(0, 64, (64, 512), device="cuda")
        for start in range(0, 64, 2):
            batch = ids[start : start + 2, : 512 - start]
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        results.append(gradients(model))
        if every is not None:
            kept = 6 // every
            assert str(offload).startswith(f"{kept - 1} layer inputs")
            assert ("again" in str(offload)) == (every > 1)
            assert offload.host_bytes == (kept - 1) * PIECE_BYTES
    for found in results[1:]:
        assert_same_bits(found, results[0])


@pytest.mark.gpu
@KINDS
def test_memory_of_inputs_on_a_gpu(reentrant: bool) -> None:
    """Without host memory, peak memory falls by the inputs that are not kept, but for slack: the
    input that is computed again and the one that it is computed from.
    """
    layers, hidden, tokens = 12, 512, 16384
    size, peaks = tokens * hidden * 2, []
    sizes: Any = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": hidden}
    for every in (1, 2):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model: Any = model_of(reentrant, attention_dropout=0.0, **sizes)
        model = model.to(torch.bfloat16)
        bound = 1e-6  # GiB: no input fits
        apply_patch(model, checkpoint_offload=bound, checkpoint_every=every)
        ids = torch.randint(0, 64, (128, tokens // 128), device="cuda")
        for _ in range(2):
            model.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # inputs that stay on the GPU
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            del loss
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] - peaks[1] >= (layers // 2 - 3) * size
