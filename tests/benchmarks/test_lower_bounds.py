"""The lower bound of a training step: which calls are repeated, with which inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.lower_bounds import step_matmuls

TOKENS, SUPERVISED, SIZE, V = 6, 4, 3, 7
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
STEP = ["aten::mm", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", ATTENTION, "aten::mm"]


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made.append((func.name(), [each for each in args if isinstance(each, Tensor)]))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def weights() -> dict[str, Tensor]:
    sizes = {"square": (SIZE, SIZE), "bias": (SIZE,), "head": (V, SIZE)}
    return {name: torch.randn(size, requires_grad=True) for name, size in sizes.items()}


def step(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    square = weights["square"]
    x = x.mm(square).relu() + x.mm(square.t())  # of the same shapes
    x = torch.addmm(weights["bias"], x, square)
    batched = x.view(2, -1, SIZE)
    batched = batched.bmm(batched.mT)
    batched = torch.baddbmm(batched, batched, batched)
    heads = batched.view(1, 2, SIZE, -1)
    return (
        scaled_dot_product_attention(heads, heads, heads)
        .reshape(TOKENS, -1)
        .mm(weights["head"].t())
    )


def calls(function) -> list[tuple[str, list[Tensor]]]:
    with Calls() as calls:
        function()
    return [(name, args) for name, args in calls.made if name in STEP]


def test_matmuls_and_attentions_are_repeated_in_order_with_their_inputs(weights):
    x = torch.randn(TOKENS, SIZE)
    sizes = {"tokens": TOKENS, "supervised": SUPERVISED, "vocab_size": V}
    bound = step_matmuls(lambda: step(weights, x), **sizes)
    truth, again = calls(lambda: step(weights, x)), calls(bound)
    assert [name for name, _ in again] == [name for name, _ in truth] == STEP
    for (_, expected), (_, args) in zip(truth[:-1], again[:-1], strict=True):
        for a, b in zip(args, expected, strict=True):
            assert a.stride() == b.stride()
            assert torch.equal(a, b)
    (states, head), (expected, _) = again[-1][1], truth[-1][1]
    assert torch.equal(states, expected[:SUPERVISED])
    assert torch.equal(head, weights["head"].t())


def test_only_the_inputs_of_the_step_are_kept(weights):
    x = torch.randn(TOKENS, SIZE)
    sizes = {"tokens": TOKENS, "supervised": SUPERVISED, "vocab_size": V}
    made = calls(step_matmuls(lambda: step(weights, x), **sizes))
    assert not any(each.requires_grad for _, args in made for each in args)  # no graph
    states = made[-1][1][0]
    assert states.untyped_storage().nbytes() == states.nbytes


def test_calls_of_one_kind_have_the_inputs_of_the_first(weights):
    rows = torch.randn(2, TOKENS, SIZE)

    def twice() -> None:
        for x in rows:
            x.mm(weights["square"]).mm(weights["head"].t())

    again = calls(step_matmuls(twice, tokens=TOKENS, supervised=SUPERVISED, vocab_size=V))
    assert len(again) == 4
    assert torch.equal(again[0][1][0], rows[0])
    assert again[2][1][0] is again[0][1][0]


def test_matmuls_of_another_head_are_an_error(weights):
    x = torch.randn(TOKENS, SIZE)
    with pytest.raises(ValueError, match="no matmul of 6 tokens and a vocabulary of 8"):
        step_matmuls(lambda: step(weights, x), tokens=TOKENS, supervised=4, vocab_size=8)
