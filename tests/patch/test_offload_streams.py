"""Offloaded checkpoints: copies on the side stream have an order with what the model does.

On the CPU, logs stand in for the streams; on a GPU, one of the two is far behind the other.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from offloaded_models import KINDS
from stream_log import Stream, StreamLog
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_patch.patch.layer_input import PIECE_BYTES, Lane, LayerInput
from liger_patch.patch.offload import FUNCTION, CheckpointOffload

PAUSE = 2 * 10**7  # clock cycles of a GPU, about 10 ms: a copy takes less than 1 ms


class Layer(GradientCheckpointingLayer):
    """The sine of scaled inputs, after ``pause`` is called."""

    gradient_checkpointing = True

    def __init__(self, width: int, reentrant: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 1)
        self.pause: Callable[[], None] = lambda: None
        setattr(self, FUNCTION, functools.partial(checkpoint, use_reentrant=reentrant))

    def forward(self, x: Tensor) -> Tensor:
        self.pause()
        return (x * self.scale).sin()


def layers_of(width: int, reentrant: bool) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(width, reentrant) for _ in range(6)))


def offload_with(lane: Lane) -> CheckpointOffload:
    device = torch.device("cuda", 0) if lane.is_pinned else torch.device("cpu")
    offload = CheckpointOffload(device_types=(device.type,), min_bytes=1)
    offload._lanes[device] = lane
    return offload


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
    offload = offload_with(lane)

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


class WithPauses:
    """``torch.cuda``, where whatever runs on one stream begins with a pause."""

    Event = torch.cuda.Event
    current_stream = staticmethod(torch.cuda.current_stream)

    def __init__(self, slow: Any) -> None:
        self.slow = slow

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        with torch.cuda.stream(stream):
            if stream == self.slow:
                torch.cuda._sleep(PAUSE)
            yield


def slow_lane() -> Lane:
    """A lane of the first GPU, with a pause before each copy."""
    lane = Lane(torch.device("cuda", 0))
    lane.module = WithPauses(lane.stream)
    return lane


@pytest.mark.gpu
@KINDS
@pytest.mark.parametrize("slow", ["side", "model"])
def test_gradients_where_a_stream_is_far_behind_on_a_gpu(slow: str, reentrant: bool) -> None:
    """Inputs are of 16 MiB, and other ones in each step: what memory held before is wrong."""
    rows, width = PIECE_BYTES // 4096, 1024
    layers = layers_of(width, reentrant).cuda()
    batches = [torch.randn(rows, width, device="cuda") for _ in range(4)]
    results = []
    for is_offloaded in (False, True):
        offload = offload_with(slow_lane() if slow == "side" else Lane(torch.device("cuda", 0)))
        for layer in layers:
            layer.scale.grad = None
            if is_offloaded and slow == "model":
                layer.pause = functools.partial(torch.cuda._sleep, PAUSE)
        torch.cuda.synchronize()
        found = []
        for batch in batches:
            x = (batch * 1).requires_grad_()
            if is_offloaded:
                with offload.forward_pass(layers):
                    y = layers(x)
            else:
                y = layers(x)
            y.sum().backward()
            found.append(x.grad)
            del x, y
        torch.cuda.synchronize()
        results.append([*found, *(layer.scale.grad for layer in layers)])
        if is_offloaded:
            assert str(offload).startswith("5 layer inputs")
    for expected, value in zip(*results, strict=True):
        assert expected is not None
        assert torch.equal(value, expected)
