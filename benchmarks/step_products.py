"""The matrix products and attentions of eager's step alone: the floor of a step that keeps them.

Each kind of call (same operator, shapes, strides and dtypes) is made again as often as in the step,
with the numbers of the first of its kind: so what it reads may lie in the cache. Products with the
vocabulary have rows for the supervised tokens only. Products by other operators than PRODUCTS, a
library's own, are not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


class _Record(TorchDispatchMode):
    """Holds the arguments of each different call once, and the order of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple] = []
        self.calls: dict[tuple, tuple[Any, tuple, dict]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in PRODUCTS or "attention" in func.name():
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


def step_products(
    step: Callable[[], object], *, tokens: int, supervised: int, vocab_size: int
) -> Callable[[], None]:
    """A function that computes the products and attentions of one call of ``step``.

    Args:
        tokens: of a step, which is no size of the head.
        supervised: of these.
        vocab_size: of the head, which is the size of nothing else.

    Raises:
        ValueError: no product has rows for the tokens and columns for the vocabulary.
    """
    with _Record() as record:
        step()
    order, calls = record.order, record.calls
    of_head = [key for key, call in calls.items() if _sizes(call) >= {tokens, vocab_size}]
    if not of_head:
        raise ValueError(f"no product of {tokens} tokens and a vocabulary of {vocab_size}")
    for key in of_head:
        calls[key] = _of_supervised(calls[key], tokens, supervised)

    def products() -> None:
        for key in order:
            func, args, kwargs = calls[key]
            func(*args, **kwargs)

    return products


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
