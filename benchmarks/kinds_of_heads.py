"""Measure heads with LoRA beside the plain frozen head.

    python -m benchmarks kinds_of_heads

Forward and backward of head and loss, with the gradients of the hidden states and of the adapter.
All kinds run in this one process, contenders interleaved. Before anything is timed, our gradients
are compared with eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor, nn

from liger_patch import linear_cross_entropy

from .benchmark import Benchmark, Rows
from .heads import HEADS, Head, batch
from .lower_bounds import head_matmuls
from .measure import (
    MAX_RELATIVE_ERROR,
    Failure,
    attempt,
    checked_rows,
    measure,
    relative_error,
    release_memory,
)
from .names import LOWER_BOUND

(LLAMA,) = (head for head in HEADS if head.name == "Llama-3-8B, frozen")
QWEN = Head("Qwen3-8B, frozen", 4096, 151936, 8192, frozen=True)


@dataclass(frozen=True)
class Kind:
    """A head, frozen, with or without an adapter.

    Attributes:
        name: of the model and what is special.
        head: shape of the head, frozen.
        rank: of an adapter (LoRA) on it, 0 for none.
    """

    name: str
    head: Head
    rank: int = 0


KINDS = (
    Kind("Llama-3-8B, frozen", LLAMA),
    Kind("Llama-3-8B, frozen, LoRA r 16", LLAMA, rank=16),
    Kind("Llama-3-8B, frozen, LoRA r 64", LLAMA, rank=64),
    Kind("Qwen3-8B, frozen", QWEN),
    Kind("Qwen3-8B, frozen, LoRA r 16", QWEN, rank=16),
)


def run_kind(kind: Kind, *, rounds: int, device: torch.device | str = "cuda") -> Rows:
    """Compare, then time eager and ours on one kind; the lower bound is the first row."""
    rows = attempt(lambda: _rows(kind, rounds, device))
    release_memory()
    if isinstance(rows, Failure):
        return [{**_key(kind), "contender": LOWER_BOUND, **asdict(rows)}]
    return rows


def _rows(kind: Kind, rounds: int, device: torch.device | str) -> Rows:
    hidden_states, weight, labels = batch(kind.head, device=device)
    bound = head_matmuls(kind.head, hidden_states, weight, labels)
    leaves = [hidden_states]
    if kind.rank:
        a = torch.randn(kind.rank, kind.head.hidden_size, device=device) / 64
        b = torch.randn(kind.head.vocab_size, kind.rank, device=device) / 64
        leaves += [each.bfloat16().requires_grad_() for each in (a, b)]
    steps = {
        "eager": partial(_step, partial(_eager, weight, labels), leaves),
        "liger_patch": partial(_step, partial(_ours, weight, labels), leaves),
    }
    eager, ours = (step() for step in steps.values())
    errors = [relative_error(own, true) for own, true in zip(ours, eager, strict=True)]
    del eager, ours
    if max(errors) > MAX_RELATIVE_ERROR:
        raise RuntimeError(f"{kind.name}: gradients differ from eager's by {errors}")
    measured = measure({LOWER_BOUND: bound, **steps}, before=bound, rounds=rounds, device=device)
    return checked_rows(_key(kind), {"eager": [0.0], "liger_patch": errors}, measured)


def _key(kind: Kind) -> dict:
    return {"case": kind.name, "tokens": kind.head.tokens}


def _adapter(x: Tensor, adapter: tuple[Tensor, ...]) -> tuple[Tensor, Tensor] | None:
    return (nn.functional.linear(x, adapter[0]), adapter[1]) if adapter else None


def _eager(weight: Tensor, labels: Tensor, x: Tensor, *adapter: Tensor) -> Tensor:
    logits = nn.functional.linear(x, weight)
    low_rank = _adapter(x, adapter)
    if low_rank is not None:
        logits = logits + nn.functional.linear(*low_rank)
    return nn.functional.cross_entropy(logits.float(), labels)


def _ours(weight: Tensor, labels: Tensor, x: Tensor, *adapter: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, labels, low_rank=_adapter(x, adapter))


def _step(loss: Callable[..., Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(*leaves), leaves)


BENCHMARK = Benchmark(
    packages=(),
    cases=lambda options: {
        "heads": [partial(run_kind, kind, rounds=options.rounds) for kind in KINDS]
    },
    rounds=10,
)
