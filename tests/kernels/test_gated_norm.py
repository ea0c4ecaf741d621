"""Norms with a gate: results and every gradient against float64, no worse than what the models
compute in the same dtype, of rows a stride apart.
"""

from functools import partial

import pytest
import torch
from eager_layers import EPS, GATES, gate_behind, gate_in_front
from layer_checks import check, gated_norm
from slow_cases import slow_but
from three_ways import DTYPES

from liger_patch.kernels.gated_norm import MAX_GROUP_SIZE

SHAPES = {  # of x, and features of a group
    "one row": ((1, 64), 64),
    "aligned": ((64, 128), 128),
    "unaligned": ((13, 37), 37),
    "groups": ((3, 5, 48), 12),
    "long groups": ((3, 4200), 2100),
    "none": ((0, 8), 4),
}


EAGER = {False: gate_behind, True: gate_in_front}


@pytest.mark.parametrize(("shape", "size"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", slow_but([DTYPES[0], DTYPES[-1]], DTYPES), ids=str)
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_norm(shape, size, dtype, activation, gate_first, device):
    inputs = {
        "x": torch.randn(shape) * 3,
        "gate": torch.randn(shape) * 4,
        "weight": torch.randn(shape[-1]),
    }
    inputs = {name: value.to(device, dtype) for name, value in inputs.items()}
    form = {"group_size": size, "activation": activation, "gate_first": gate_first}
    eager = partial(EAGER[gate_first], size=size, activation=activation)
    check(partial(gated_norm, eps=EPS, **form), eager, inputs)


def test_a_gate_beside_others_in_memory_is_not_copied(device, kept):
    """As a layer's projection leaves it."""
    both = torch.randn(4, 6, 50, device=device, requires_grad=True)
    gated_norm(both[..., :20], both[..., 30:], torch.randn(20, device=device), EPS)
    memory = {t.untyped_storage().data_ptr() for t in kept}
    assert len(kept) == 4
    assert len(memory) == 3  # x and gate, the weight, one number a row


@pytest.mark.parametrize("gate_first", [False, True])
def test_gate_and_weight_of_other_dtypes_keep_theirs(gate_first, device):
    x = torch.randn(7, 24, device=device, dtype=torch.bfloat16)
    gate, weight = torch.randn(7, 24, device=device), torch.randn(24, device=device)
    dtype = torch.float32 if gate_first else None
    ours = partial(gated_norm, eps=EPS, gate_first=gate_first, dtype=dtype)
    eager = partial(EAGER[gate_first], size=24, activation="silu")
    check(ours, eager, {"x": x, "gate": gate, "weight": weight})


@pytest.mark.parametrize("activation", GATES)
def test_a_gate_far_from_zero_is_finite(activation, device):
    gate = torch.tensor([[-80.0, -40.0, 0.0, 40.0, 80.0]], device=device, requires_grad=True)
    x = torch.ones_like(gate).requires_grad_()
    y = gated_norm(x, gate, torch.ones(5, device=device), EPS, activation=activation)
    gradients = torch.autograd.grad(y.sum(), (x, gate))
    assert all(torch.isfinite(t).all() for t in (y, *gradients))


def test_groups_too_long_for_registers_are_computed_by_pytorch(device):
    long = torch.randn(2, 20000, device=device, dtype=torch.bfloat16)
    weight = torch.randn(20000, device=device, dtype=torch.bfloat16)
    assert long.shape[-1] > MAX_GROUP_SIZE
    inputs = {"x": long, "gate": long.flip(0), "weight": weight}
    eager = partial(gate_behind, size=20000, activation="silu")
    check(partial(gated_norm, eps=EPS), eager, inputs)
