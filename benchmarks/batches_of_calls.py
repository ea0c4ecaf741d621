"""Time short calls in batches.

A call that takes microseconds takes less than the host needs to queue it, and its inputs fit into
the L2 cache. So the calls of a batch have memory of their own, results included, and are queued
while the device is busy with a load in front of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .measure import Failure, Measurement, measure

BATCH_BYTES = 2 * 2**30  # that its calls move: many times the L2 cache of 60 MB
FEWEST_CALLS, MOST_CALLS = 4, 24  # of a batch: 24 of eager's queue hundreds of kernels
LOAD_MS = 20.0  # of copies in front of a batch: several times what queueing takes
MOST_QUEUEING_MS = 0.75 * LOAD_MS  # of a batch: the load has to be queued in front of it

Function = Callable[..., Tensor | tuple[Tensor, ...]]  # of leaves, then constants
Batch = Callable[[], object]


class Inputs(NamedTuple):
    """Tensors of one call.

    Attributes:
        leaves: what gets a gradient.
        constants: the other arguments.
        upstream: gradients of the results.
    """

    leaves: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    upstream: tuple[Tensor, ...]

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """Apply the function to each tensor."""
        return Inputs(*(tuple(function(each) for each in group) for group in self))

    def trainable(self) -> Inputs:
        """Make the leaves require gradients, and return the same tensors."""
        for leaf in self.leaves:
            leaf.requires_grad_()
        return self


class Slots:
    """Inputs of several calls: equal, of the same strides, each in memory of its own.

    Attributes:
        inputs: one of each call.
    """

    def __init__(self, inputs: Inputs, calls: int) -> None:
        self._originals = inputs
        self._stacks = inputs.map(lambda each: _stack(each, calls))
        self.restore()
        self.inputs = [
            # .data: autograd does not see that what it saved is restored
            self._stacks.map(lambda stack, place=place: stack[place].data).trainable()
            for place in range(calls)
        ]

    def restore(self) -> None:
        """Undo what calls have overwritten: some compute in place."""
        for stacks, originals in zip(self._stacks, self._originals, strict=True):
            for stack, original in zip(stacks, originals, strict=True):
                stack.copy_(original)


def calls_of(size: int) -> int:
    """Return how many calls make a batch, where each moves so many bytes."""
    return min(MOST_CALLS, max(FEWEST_CALLS, math.ceil(BATCH_BYTES / size)))


def results_of(function: Function, inputs: Inputs) -> tuple[Tensor, ...]:
    results = function(*inputs.leaves, *inputs.constants)
    return (results,) if isinstance(results, Tensor) else results


def gradients_of(results: Sequence[Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
    return torch.autograd.grad(results, inputs.leaves, inputs.upstream, retain_graph=True)


def forward_batch(function: Function, slots: Slots) -> Batch:
    return lambda: [results_of(function, inputs) for inputs in slots.inputs]


def backward_batch(function: Function, slots: Slots) -> Batch:
    slots.restore()
    graphs = [(results_of(function, inputs), inputs) for inputs in slots.inputs]
    return lambda: [gradients_of(results, inputs) for results, inputs in graphs]


def copies(size: int, calls: int, device: torch.device | str) -> Batch:
    """Return a batch of copies on the device; half of the bytes are read, half written."""
    sources = torch.randint(256, (calls, size // 2), dtype=torch.uint8, device=device)
    places = torch.empty_like(sources)
    pairs = list(zip(places, sources, strict=True))
    return lambda: [place.copy_(source) for place, source in pairs]


def measure_batches(
    batches: Mapping[str, Batch],
    slots: Slots,
    *,
    rounds: int,
    device: torch.device | str = "cuda",
) -> dict[str, Measurement | Failure]:
    """Measure batches as ``measure`` does, and return the times of one call.

    A batch that the device had to wait for is a failure.
    """
    # restoring is a load of copies, of memory that a batch reads anyway
    measured = measure(batches, before=slots.restore, load_ms=LOAD_MS, rounds=rounds, device=device)
    calls = len(slots.inputs)
    waits = torch.device(device).type == "cuda"
    return {name: _of_a_call(batch, calls, waits) for name, batch in measured.items()}


def _of_a_call(batch: Measurement | Failure, calls: int, waits: bool) -> Measurement | Failure:
    if isinstance(batch, Failure):
        return batch
    if waits and batch.host_ms > MOST_QUEUEING_MS:
        return Failure(f"not timed: it takes {batch.host_ms:.0f} ms to queue {calls} calls")
    times = ("ms", "ms_low", "ms_high", "host_ms")
    return replace(batch, **{name: getattr(batch, name) / calls for name in times})


def _stack(tensor: Tensor, calls: int) -> Tensor:
    """Allocate room for as many tensors of these strides, one behind the other."""
    shape, stride = (calls, *tensor.shape), (tensor.numel(), *tensor.stride())
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
