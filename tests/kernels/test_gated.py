"""Gated activations: results and every gradient against float64, no worse than what the models
compute in the same dtype.
"""

import pytest
import torch
from layer_checks import ACTIVATIONS, check, gated
from slow_cases import each_pair
from three_ways import DTYPES
from torch import Tensor


@each_pair(
    halves=[False, True],
    activation=ACTIVATIONS,
    shape=[(1,), (8, 128), (64, 128), (3, 5, 37), (7, 2100), (0, 4), (3, 0)],
    dtype=DTYPES,
)
def test_gated(halves, activation, shape, dtype, device):
    """Of two tensors, or of the halves of one."""
    inputs = {name: torch.randn(shape) * 4 for name in ("gate", "up")}
    if halves:
        inputs = {"both": torch.cat([*inputs.values()], -1)}

    def ours(**named: Tensor) -> Tensor:
        return gated(*named.values(), activation=activation)

    def eager(**named: Tensor) -> Tensor:
        gate, up = named["both"].chunk(2, -1) if halves else named.values()
        return ACTIVATIONS[activation](gate) * up

    check(ours, eager, {name: value.to(device, dtype) for name, value in inputs.items()})


def test_nothing_is_copied_for_halves_of_one_tensor(device, kept):
    both = torch.randn(3, 5, 32, device=device, requires_grad=True)
    gated(both).sum().backward()
    assert [t.data_ptr() for t in kept] == [both.data_ptr()]
    assert both.grad is not None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_far_from_zero_is_finite(activation, device):
    gate = torch.tensor([-60.0, -40.0, 0.0, 40.0, 60.0], device=device, requires_grad=True)
    y = gated(gate, torch.ones_like(gate), activation=activation)
    (slope,) = torch.autograd.grad(y.sum(), gate)
    torch.testing.assert_close(y, gate.detach().clamp(min=0))
    torch.testing.assert_close(slope, torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0], device=device))
