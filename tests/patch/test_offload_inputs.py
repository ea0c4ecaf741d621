"""Offloaded checkpoints: which inputs of a layer go to host memory, and which stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from liger_patch.patch.layer_input import PIECE_BYTES
from liger_patch.patch.offload import FUNCTION, CheckpointOffload


def plain_checkpoint(*args: Any, **kwargs: Any) -> Any:
    return checkpoint(*args, **kwargs, use_reentrant=False)


class Checkpointed(GradientCheckpointingLayer):
    """A layer whose forward can modify what it is given."""

    gradient_checkpointing = True

    def __init__(self, *, modifies: bool = False) -> None:
        super().__init__()
        self.modifies = modifies
        setattr(self, FUNCTION, plain_checkpoint)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        y = x.sin()
        if self.modifies:
            x.mul_(2)
        return y


def test_inputs_larger_than_a_piece() -> None:
    offload = CheckpointOffload(device_types=("cpu",), min_bytes=1)
    layer = Checkpointed()
    values = torch.randn(700, 3, 3001)
    for made in (lambda x: x, lambda x: x[1:]):
        x = made(values.clone().requires_grad_())
        with offload.forward_pass(layer):
            y, last = layer(x), layer(torch.ones(4, requires_grad=True))
        (found,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(found, torch.cos(x))
        del last
    assert offload.host_bytes == 2 * PIECE_BYTES


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(8, 9)[:, 5:],
        lambda: torch.randn(8, 1).expand(8, 9),
        lambda: torch.randn(9, 8).mT,
        lambda: torch.randn(0, 9),
        lambda: nn.Parameter(torch.randn(8, 9)),
    ],
    ids=["gaps", "expanded", "transposed", "empty", "a parameter"],
)
def test_inputs_that_stay_on_the_device(make: Callable[[], Tensor]) -> None:
    offload = CheckpointOffload(device_types=("cpu",), min_bytes=1)
    layer = Checkpointed()
    x = make().requires_grad_()
    with offload.forward_pass(layer):
        y, last = layer(x), layer(torch.ones(4, requires_grad=True))
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, torch.cos(x))
    assert str(offload) == "0 layer inputs, 0 MiB of host memory"  # the last is never copied
    del last


@pytest.mark.filterwarnings("ignore:liger_patch offloads no checkpoint")
@pytest.mark.parametrize(("min_bytes", "later"), [(1, 0), (1, 1), (1, 2), (2**20, 0)])
def test_an_input_modified_in_place_is_an_error(min_bytes: int, later: int) -> None:
    """PyTorch itself does not look at saved tensors that hooks have seen."""
    offload = CheckpointOffload(device_types=("cpu",), min_bytes=min_bytes)
    layer = Checkpointed(modifies=True)
    with offload.forward_pass(layer):
        y = layer(torch.ones(4, requires_grad=True) * 1)
        others = [layer(torch.ones(4, requires_grad=True) * 1) for _ in range(later)]
    assert len(others) * PIECE_BYTES == offload.host_bytes
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_other_arguments_stay_as_they_are() -> None:
    offload = CheckpointOffload(device_types=("cpu",), min_bytes=1)
    layer = Checkpointed()
    x, mask, others = torch.ones(4, requires_grad=True), torch.ones(4).bool(), torch.ones(4)
    with offload.forward_pass(layer):
        y = layer(layer(x, mask, others, "name"), mask, others, "name")
    assert str(offload).startswith("1 layer inputs")
    y.sum().backward()
