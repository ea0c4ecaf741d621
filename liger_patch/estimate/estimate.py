"""Estimate where the memory of a training step goes, and the longest sequence that fits a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from liger_patch.estimate.model import Sizes, TrainingStep, build, described, without_adapters
from liger_patch.estimate.operations import CHUNK
from liger_patch.estimate.step import (
    CONTENDERS,
    EAGER,
    Contender,
    chunk_bytes,
    host_bytes,
    trace_step,
)
from liger_patch.estimate.trace import BACKWARD, HEAD, HEAD_BACKWARD, LAYER, Allocation, Trace
from liger_patch.kernels.chunk_sizes import longest_at_once, size_of_experts
from liger_patch.layers.checks import TOP_HOOKS
from liger_patch.layers.long_rows import LONG_INPUT_BYTES
from liger_patch.patch.offload import MIN_BYTES

GIB = 2**30
CARDS = (16, 24, 40, 48, 80, 141)  # GiB
WORKSPACES = 64 * 2**20  # that cuBLAS holds on a Hopper GPU: two of 32 MiB
BYTES_OF_A_TOKEN = 24  # of inputs: its id, label and mask
LONGEST = 2**24  # tokens: longer sequences are not tried
LEAST_PROBED = 1024  # tokens of a sequence
SHORT = 8, 16  # tokens of the sequences by which loops over tokens are found
PARTS = (
    "weights",
    "optimizer states",
    "inputs and workspaces",
    "gradients",
    "kept by the layers",
    "layer at work",
    "logits and loss",
    CHUNK,
    "gradient of hidden states",
    "gradient of the head",
    "outside the layers",
)


@dataclass(frozen=True)
class Estimate:
    """The memory of one contender's step, in bytes.

    Attributes:
        name: of the contender.
        parts: what exists at the peak, by names of PARTS.
        longest: tokens of the longest sequences that fit, by GiB of the GPU; empty where the number
            of pieces depends on the length, or the model takes no longer sequences.
        host: of host memory, for offloaded checkpoints.
        longest_host: the same for each of ``longest``.
    """

    name: str
    parts: Mapping[str, int]
    longest: Mapping[float, int] = field(default_factory=dict)
    host: int = 0
    longest_host: Mapping[float, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Bytes that exist at once, at most."""
        return sum(self.parts.values())


def estimate(config: Any, step: TrainingStep, reserve: int = GIB) -> list[Estimate]:
    """Return what the step of each contender takes.

    Args:
        reserve: bytes of each GPU that a step cannot have: CUDA's context, fragmentation.

    Raises:
        ValueError: a model that cannot be built or traced; the message says which of its steps
            failed, and how.
    """
    found = []
    with explained(config, "can be built from its config with these options"):
        build(config, step)
    with explained(config, f"takes steps of {SHORT[0]} and {SHORT[1]} tokens"):
        is_slow = _loops_over_tokens(config, step)
    for contender in CONTENDERS:
        what = f"takes a step of {step.length} tokens, as {contender.name} runs it,"
        with explained(config, what):
            trace, sizes = trace_step(config, step, contender)
        with explained(config, "takes steps of several lengths"):
            try:
                rows = {} if is_slow else longest_rows(config, step, contender, sizes, reserve)
            except RuntimeError:
                if (most_positions(config) or LONGEST) > LEAST_PROBED:
                    raise
                rows = {}  # BERT slices its table of positions, beyond which rows are traced
        found.append(
            Estimate(
                contender.name,
                parts_at_peak(trace, sizes, step),
                {card: tokens for card, (tokens, _) in rows.items()},
                sum(host_bytes(each.size) for each in trace.sent),
                {card: host for card, (_, host) in rows.items()},
            )
        )
    return found


def _loops_over_tokens(config: Any, step: TrainingStep) -> bool:
    """Return whether a model's own code runs once for each token, as that of Mamba does without its
    kernels: a trace takes as many times longer, and no longest rows are estimated.
    """
    counts = [
        len(trace_step(config, replace(step, length=each), EAGER)[0].allocations) for each in SHORT
    ]
    return counts[1] - counts[0] >= SHORT[1] - SHORT[0]


@contextmanager
def explained(config: Any, what: str) -> Iterator[None]:
    """Raise the error of any model's code as a ValueError that says what it cannot do."""
    try:
        yield
    except Exception as error:
        positions = most_positions(config)
        ends = "" if positions is None else f", with {positions:,} positions"
        raise ValueError(
            f"model must be one that {what} on the meta device, without values, got "
            f"{config.model_type!r}{ends}: {described(error)}"
        ) from error


def most_positions(config: Any) -> int | None:
    """Return how many positions a model's text has, None where its config does not say."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def parts_at_peak(trace: Trace, sizes: Sizes, step: TrainingStep) -> dict[str, int]:
    """Return what exists when most memory is in use, in bytes, in the order of PARTS."""
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    parts["weights"] = sizes.weights
    parts["optimizer states"] = sizes.optimizer
    parts["inputs and workspaces"] = _beside(step)
    _, event = trace.peak()
    for each in trace.alive(event):
        parts[_part(each, event)] += each.size
    return {name: size for name, size in parts.items() if size}


def _beside(step: TrainingStep) -> int:
    return WORKSPACES + BYTES_OF_A_TOKEN * step.batch * step.length


def _part(each: Allocation, event: int) -> str:
    if each.purpose:
        return each.purpose
    if each.is_gradient:
        return "gradients"
    if each.place in (HEAD, HEAD_BACKWARD):
        return "logits and loss"
    if each.place == BACKWARD:
        return "layer at work"
    if each.place != LAYER:
        return "outside the layers"
    ended, died = each.call_end, each.death
    is_temporary = ended is None or (died is not None and event < ended and died <= ended)
    return "layer at work" if is_temporary else "kept by the layers"


def longest_rows(
    config: Any,
    step: TrainingStep,
    contender: Contender,
    sizes: Sizes,
    reserve: int,
) -> dict[float, tuple[int, int]]:
    """Return the tokens of the longest sequences that fit each GPU, by its GiB, and the bytes of
    host memory for them.
    """
    growth = Growth.of(config, step, replace(contender, slices=False))
    if growth is None:
        return {}
    ranges = [(0, LONGEST, growth)]
    at_once = longest_unsliced(config, step, contender)
    if at_once is not None:
        sliced = Growth.of(config, step, contender, at_once + 1)
        if sliced is not None:
            # tried first: a row in slices may fit where a shorter one without slices does not
            ranges = [(at_once, LONGEST, sliced), (0, at_once, growth)]
    found = {}
    for card in CARDS:
        room = card * GIB - reserve - sizes.weights - sizes.optimizer
        for low, high, each in ranges:
            shortest = low
            while low < high:
                middle = (low + high + 1) // 2
                fits = each.peak(middle) + _beside(replace(step, length=middle)) <= room
                low, high = (middle, high) if fits else (low, middle - 1)
            found[card] = low, each.host_bytes(low)
            if low > shortest:
                break
    return found


def longest_unsliced(config: Any, step: TrainingStep, contender: Contender) -> int | None:
    """Return the tokens of the longest sequences for which a feed-forward layer does not run in
    slices, or a norm is kept. None where the length makes no such difference.
    """
    runs_slices = contender.slices and contender.head == "chunks" and contender.layers
    if not (runs_slices and step.checkpointing) or TOP_HOOKS is None:
        return None
    model = without_adapters(config, step)
    downs: list[Any] = [getattr(each, "down_proj", None) for each in model.modules()]
    shapes = [tuple(each.weight.shape) for each in downs if hasattr(each, "weight")]
    for each in downs:
        if isinstance(each, Tensor):  # of experts
            text = config.get_text_config()
            # where a configuration has another name: as if longer rows ran at once, in more memory
            slots = getattr(text, "num_experts_per_tok", 1)
            hidden = text.hidden_size
            size = size_of_experts(hidden, each[0].numel() // hidden, slots)
            shapes.append((hidden, size))
    if not shapes:
        return None
    hidden_size, size = (min(each) for each in zip(*shapes, strict=True))
    at_once = longest_at_once(size, (step.autocast or step.dtype).itemsize)
    keeps_norms = LONG_INPUT_BYTES // (hidden_size * step.dtype.itemsize)
    return max(at_once, keeps_norms) // step.batch


class Growth:
    """The peak of a step as a function of the length of its sequences.

    The step is traced at three lengths. It allocates and frees the same pieces in the same order,
    each of a size that is a polynomial of the length: of degree 2 for a mask, mostly of degree 1.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        traces: Sequence[Trace],
        step: TrainingStep,
    ) -> None:
        self._step = step
        pieces = traces[0].allocations
        count = traces[0].events + 2
        self._births = torch.tensor([each.birth for each in pieces])
        self._deaths = torch.tensor([each.death or count - 1 for each in pieces])
        self._count = count
        sent = {id(each) for each in traces[0].sent}
        self._sent = [i for i, each in enumerate(pieces) if id(each) in sent]
        self._chunks = [i for i, each in enumerate(pieces) if each.purpose == CHUNK]
        powers = torch.tensor([[1.0, n, n * n] for n in lengths], dtype=torch.float64)
        sizes = [[float(each.size) for each in trace.allocations] for trace in traces]
        self._factors = torch.linalg.solve(powers, torch.tensor(sizes, dtype=torch.float64))
        self._head = None

    @classmethod
    def of(
        cls, config: Any, step: TrainingStep, contender: Contender, shortest: int | None = None
    ) -> Growth | None:
        """Trace the steps; None where they do not allocate the same pieces.

        Args:
            shortest: the tokens of the shortest sequences; None for what any model can take.
        """
        # multiples of LEAST_PROBED: with others, the allocator rounds sizes up, and they are no
        # polynomials of the length
        first = -(-(shortest or 1) // LEAST_PROBED) * LEAST_PROBED
        first = max(first, 2 * _window(config))
        if step.checkpoint_offload:  # shorter rows than these stay on the GPU
            row_bytes = step.batch * config.get_text_config().hidden_size * step.dtype.itemsize
            first = max(first, -(-MIN_BYTES // (row_bytes * LEAST_PROBED)) * LEAST_PROBED)
        lengths = [first, 2 * first, 4 * first]
        traces = [
            trace_step(config, replace(step, length=each), contender, short_masks=False)[0]
            for each in lengths
        ]
        if len({tuple((e.birth, e.death) for e in each.allocations) for each in traces}) > 1:
            return None
        growth = cls(lengths, traces, step)
        if growth._chunks:
            head = without_adapters(config, step).get_output_embeddings()
            growth._head = head.weight.requires_grad_(step.lora_rank is None)
        return growth

    def host_bytes(self, length: int) -> int:
        """Return the bytes of host memory that a step of sequences of this length takes."""
        return sum(host_bytes(round(each)) for each in self._sizes(length)[self._sent].tolist())

    def _sizes(self, length: int) -> Tensor:
        return torch.tensor([1.0, length, length * length], dtype=torch.float64) @ self._factors

    def peak(self, length: int) -> float:
        """Return the most bytes that a step of sequences of this length has allocated."""
        sizes = self._sizes(length)
        if self._head is not None:
            sizes[self._chunks] = float(chunk_bytes(self._head, replace(self._step, length=length)))
        changes = torch.zeros(self._count, dtype=torch.float64)
        changes.index_add_(0, self._births, sizes)
        changes.index_add_(0, self._deaths, -sizes)
        return changes[:-1].cumsum(0).max().item()


def _window(config: Any) -> int:
    """Return the tokens that a layer with a window sees: longer rows have a mask."""
    text = config.get_text_config()
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return max((each for each in windows if isinstance(each, int)), default=0)
