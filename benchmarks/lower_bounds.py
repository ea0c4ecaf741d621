"""Compute lower bounds: the matmuls of a head, and the matmuls and attentions of eager's step.

Of a step, each kind of call (same operator, shapes, strides and dtypes) is repeated as often as in
the step, with the inputs of the first call of its kind, which may lie in the cache. Matmuls with
the vocabulary have rows for the supervised tokens only. Operators of other libraries are not
recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .heads import IGNORE_INDEX, Head

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def head_matmuls(
    head: Head, hidden_states: Tensor, weight: Tensor, labels: Tensor
) -> Callable[[], None]:
    """Return a function that computes a head's matmuls for the supervised tokens, into allocated
    memory.
    """
    with torch.no_grad():
        x = hidden_states[labels != IGNORE_INDEX].contiguous()
        logits = x.new_empty(len(x), head.vocab_size)
        dx, dw = torch.empty_like(x), None if head.frozen else torch.empty_like(weight)

    @torch.no_grad()
    def matmuls() -> None:
        torch.mm(x, weight.t(), out=logits)
        torch.mm(logits, weight, out=dx)
        if dw is not None:
            torch.mm(logits.t(), x, out=dw)

    return matmuls


class _Record(TorchDispatchMode):
    """Record the arguments of each different call once, and the order of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple] = []
        self.calls: dict[tuple, tuple[Any, tuple, dict]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in MATMULS or "attention" in func.name():
            key = (func, *(_kind(each) for each in tree_leaves((args, kwargs))))
            self.order.append(key)
            if key not in self.calls:
                own = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
                self.calls[key] = (func, *own)
        return func(*args, **kwargs)


def _kind(value: Any) -> object:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.stride()
    return value


def step_matmuls(
    step: Callable[[], object], *, tokens: int, supervised: int, vocab_size: int
) -> Callable[[], None]:
    """Return a function that computes the matmuls and attentions of one call of ``step``.

    Args:
        tokens: number of tokens of a step; no dimension of the head has this size.
        supervised: how many of them have a label.
        vocab_size: of the head; no other dimension has this size.

    Raises:
        ValueError: no matmul has rows for the tokens and columns for the vocabulary.
    """
    with _Record() as record:
        step()
    order, calls = record.order, record.calls
    of_head = [key for key, call in calls.items() if _sizes(call) >= {tokens, vocab_size}]
    if not of_head:
        raise ValueError(f"no matmul of {tokens} tokens and a vocabulary of {vocab_size}")
    for key in of_head:
        calls[key] = _of_supervised(calls[key], tokens, supervised)

    def matmuls() -> None:
        for key in order:
            func, args, kwargs = calls[key]
            func(*args, **kwargs)

    return matmuls


def _sizes(call: tuple[Any, tuple, dict]) -> set[int]:
    _, args, _ = call
    return {size for each in args if isinstance(each, Tensor) for size in each.shape}


def _of_supervised(
    call: tuple[Any, tuple, dict], tokens: int, supervised: int
) -> tuple[Any, tuple, dict]:
    func, args, kwargs = call

    def part(tensor: Tensor) -> Tensor:
        for dimension, size in enumerate(tensor.shape):
            if size == tokens:
                return tensor.narrow(dimension, 0, supervised).clone()  # and the whole is freed
        return tensor

    return func, tree_map_only(Tensor, part, args), kwargs
