"""Offloaded checkpoints: copies on the side stream have an order with what the model does. Logs
stand in for the streams.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from offloaded_models import KINDS
from stream_log import Stream, StreamLog
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_patch.patch.layer_input import Lane, LayerInput
from liger_patch.patch.offload import FUNCTION, CheckpointOffload


class Layer(GradientCheckpointingLayer):
    """The sine of scaled inputs."""

    gradient_checkpointing = True

    def __init__(self, width: int, reentrant: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 1)
        setattr(self, FUNCTION, functools.partial(checkpoint, use_reentrant=reentrant))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sin()


def layers_of(width: int, reentrant: bool) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width, reentrant) for _ in range(6)))


def sent_input(log: StreamLog, lane: Lane) -> LayerInput:
    """A layer input that is on its way to the host and, but for that, not used."""
    layer_input = LayerInput(torch.ones(8).sin(), lane, None)
    layer_input.send(lane.pieces(1) or ())
    return layer_input


def test_an_input_that_is_not_needed_is_freed_behind_its_copies() -> None:
    log = StreamLog()
    lane = log.lane(pieces=1)
    with log:
        layer_input = sent_input(log, lane)
        out = log.last
        del layer_input
        assert log.last.name == "free"
        assert out.is_before(log.last)
        layer_input = sent_input(log, lane)
        layer_input.release_source()
        layer_input.fetch()
        fetch = log.last
        del layer_input
        assert log.last.name == "free"
        assert fetch.is_before(log.last)
    assert lane.made == 1
    assert log.races == []


def test_an_input_that_is_used_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    log = StreamLog()
    lane = log.lane(pieces=1)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: log.record_stream(t, s))
    with log:
        layer_input = sent_input(log, lane)
        layer_input.release_source()
        with log.stream(Stream("backward")):
            fetched = layer_input.unpack()
            copy = log.last
            used = fetched.cos()
            use = log.last
            del fetched
    assert str(use) == "aten.cos.default on the backward stream"
    assert str(log.last) == "free on the model's stream"
    assert copy.is_before(use)
    assert use.is_before(log.last)
    assert log.races == []
    del used


def steps(loss: Callable[[], Tensor]) -> None:
    for _ in range(2):
        loss().backward()


def several_forward_passes(loss: Callable[[], Tensor]) -> None:
    losses = [loss(), loss()]
    losses[0].backward()
    losses.append(loss())
    (losses[2] + losses[1]).backward()


def retained_graph(loss: Callable[[], Tensor]) -> None:
    kept = loss()
    kept.backward(retain_graph=True)
    kept.backward()


def forward_passes_alone(loss: Callable[[], Tensor]) -> None:
    loss()
    loss()


@KINDS
@pytest.mark.parametrize(
    ("run", "pieces", "copies"),
    [
        (steps, 5, 20),
        (several_forward_passes, 10, 30),
        (retained_graph, 5, 15),
        (forward_passes_alone, 5, 10),
    ],
)
def test_no_race(run: Callable[[Any], None], pieces: int, copies: int, reentrant: bool) -> None:
    log, layers = StreamLog(), layers_of(8, reentrant)
    lane = log.lane(pieces)
    offload = CheckpointOffload(device_types=("cpu",), min_bytes=1)
    offload._lanes[torch.device("cpu")] = lane

    def loss() -> Tensor:
        with offload.forward_pass(layers):
            y = layers(torch.rand(4, 8, requires_grad=True))
            offload.before_loss()
            return y.sum()

    with log:
        run(loss)
        gc.collect()
    side = [entry.name for entry in log.entries if entry.stream is log.side]
    assert side == ["aten.copy_.default"] * copies
    assert lane.made == len(lane.free) == pieces
    assert log.races == []
