"""Writing to deferred logits in place: seen in what was derived from them, where eager's is."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_logits import MASK, assert_same, unlike
from tiny_models import VOCAB_SIZE as V
from torch import Tensor, nn

from liger_patch.deferred.tensor import DeferredLogits


def write_to_a_view(x: Tensor) -> None:
    x.view(-1, V)[4] += 1


@torch.no_grad()  # torch refuses out= of what records gradients
def write_as_out(x: Tensor) -> None:
    torch.add(unlike(x), 1, out=x)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "by mask": lambda x: operator.setitem(x, MASK, 0),
    "to a slice": lambda x: x[:, 2:4].fill_(3.0),
    "to a view": write_to_a_view,
    "add_": lambda x: x.add_(1),
    "+=": lambda x: operator.iadd(x, 1),
    "copy_": lambda x: x.copy_(unlike(x)),
    "data": lambda x: x.data.fill_(2.0),
    "detached": lambda x: x.detach().fill_(2.0),
    "out": write_as_out,
    "functional": lambda x: nn.functional.relu_(x),
}

# what was derived from the logits before the write
DERIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "slice": lambda x: x[:, 1:],
    "view": lambda x: x.view(-1, V),
    "slice of a view": lambda x: x.view(-1, V)[2:7],
    "detached": lambda x: x.detach(),
    "product": lambda x: x * 2,
    "cast": lambda x: x.bfloat16(),
    "masked": lambda x: x[MASK],
    "indexed": lambda x: x[torch.tensor([1, 0])],
    "reshaped slice": lambda x: x[:, :-1].reshape(-1, V),
    "flattened": lambda x: x.flatten(0, 1),
    "contiguous slice": lambda x: x[:, :-1].contiguous(),
    "contiguous": lambda x: x.contiguous(),
    "slice of a product": lambda x: (x * 2)[:, :-1],
}


@pytest.mark.parametrize("read_first", [False, True])
@pytest.mark.parametrize(
    ("write", "derivation"),
    [
        (write, derivation)
        for write, derivation in itertools.product(WRITES, DERIVATIONS)
        # each write after a view and a copy; one write after each derivation
        if derivation in ("slice of a view", "cast") or write == "to a slice"
    ],
)
def test_a_write_is_seen_where_eagers_is(
    deferred: DeferredLogits, eager: Tensor, write: str, derivation: str, read_first: bool
) -> None:
    seen = []
    for x in (deferred, eager):
        logits = x.requires_grad_(x.requires_grad) if read_first else x
        derived = DERIVATIONS[derivation](logits)
        if read_first:
            derived + 0
        WRITES[write](logits)
        seen.append((derived.detach() + 0, logits.detach() + 0))
    assert_same(seen[0], seen[1])


@pytest.mark.parametrize("derivation", DERIVATIONS)
def test_a_write_to_what_was_derived_is_seen_where_eagers_is(
    deferred: DeferredLogits, eager: Tensor, derivation: str
) -> None:
    seen = []
    for x in (deferred, eager):
        derived = DERIVATIONS[derivation](x)
        derived.mul_(2)
        seen.append((derived.detach() + 0, x.detach() + 0))
    assert_same(seen[0], seen[1])


@pytest.mark.parametrize("derivation", DERIVATIONS)
def test_what_is_derived_after_a_write_has_it(
    deferred: DeferredLogits, eager: Tensor, derivation: str
) -> None:
    seen = []
    for x in (deferred, eager):
        part = x[:, :5]
        x.detach()[:, 1:3] = 7.0
        derived = DERIVATIONS[derivation](x)
        product_of_part = part * 2
        x.detach()[:, 2:4] = 9.0
        seen.append((derived.detach() + 0, product_of_part.detach() + 0, x.detach() + 0))
    assert_same(seen[0], seen[1])
