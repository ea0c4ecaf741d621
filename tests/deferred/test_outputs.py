"""The outputs of a patched model hold the deferred logits as eager's outputs hold their logits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_logits import assert_same, outputs_of
from torch import Tensor

OUTPUTS: dict[str, Callable[[Any], Any]] = {
    "key": lambda outputs: outputs["logits"],
    "position": lambda outputs: outputs[1],
    "to_tuple": lambda outputs: outputs.to_tuple()[:2],
    "keys": lambda outputs: [name for name in outputs if name != "past_key_values"],
    "dict": lambda outputs: dict(outputs)["logits"],
    "type": lambda outputs: type(outputs).__name__,
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_output_class_holds_the_logits(name: str) -> None:
    ours, expected = OUTPUTS[name](outputs_of(True)), OUTPUTS[name](outputs_of(False))
    assert_close_losses(ours, expected)


def assert_close_losses(ours: Any, expected: Any) -> None:
    if isinstance(expected, Tensor) and expected.dim() == 0:
        torch.testing.assert_close(ours, expected)
    elif isinstance(expected, (tuple, list)):
        for one, other in zip(ours, expected, strict=True):
            assert_close_losses(one, other)
    else:
        assert_same(ours, expected)


def test_a_tuple_of_outputs_holds_the_logits() -> None:
    ours, expected = (outputs_of(patch, return_dict=False) for patch in (True, False))
    assert type(ours) is tuple
    assert not ours[1].is_computed
    assert_close_losses(ours[:2], expected[:2])


def test_other_outputs_are_eagers() -> None:
    ours, expected = (outputs_of(patch, output_hidden_states=True) for patch in (True, False))
    assert not ours.logits.is_computed
    assert list(ours) == list(expected)
    assert_same(ours.hidden_states, expected.hidden_states)


def test_outputs_can_be_pickled_and_copied() -> None:
    expected = outputs_of(False).logits.detach()
    with torch.no_grad():
        outputs = outputs_of(True)
    for again in (pickle.loads(pickle.dumps(outputs)), copy.deepcopy(outputs)):
        assert type(again.logits) is Tensor
        assert torch.equal(again.logits, expected)
