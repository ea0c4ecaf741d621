"""What layers' operators need of Triton, refuse, and are to torch and DTensor."""

import sys

import pytest
import torch
from layer_checks import gated, gated_norm, rms_norm
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from liger_patch.kernels.rotary import rotary

EPS = 1e-5
TRACED = ["rms_norm", "gated", "gated_norm", "rotary"]


def test_nothing_of_triton_is_needed_where_it_serves_nothing(monkeypatch):
    for name in TRACED:
        monkeypatch.setitem(sys.modules, f"liger_patch.kernels.triton.{name}", None)
    monkeypatch.setattr("liger_patch.kernels.backend.HAS_TRITON", False)
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    turned = rotary(x, x, *torch.randn(2, 1, 3, 4))[0]
    y = rms_norm(x, None, EPS) + gated(x, x) + turned + gated_norm(x, x, x[0, 0, 0], EPS)
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    "operator", [lambda x: rms_norm(x, None, EPS), lambda x: gated(x, x)], ids=["rms_norm", "gated"]
)
def test_operators_run_on_shards_that_a_mode_watches(operator):
    """As tensor parallelism makes them: an operator has no rule of its own for them."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = torch.randn(2, 3, 5, 8)
        with FlopCounterMode(display=False):
            y = operator(DTensor.from_local(x, mesh, [Shard(1)]))
        torch.testing.assert_close(y.to_local(), operator(x))
    finally:
        distributed.destroy_process_group()


def test_operators_are_what_torch_says_an_operator_is(device):
    """In the forms that no row of ``operators`` has."""
    x, weight = torch.randn(2, 3, 5, 8, device=device), torch.randn(8, device=device)
    cos, sin = torch.randn(2, 1, 5, 4, device=device)
    each = torch.rand(x.shape[:-1], device=device)[..., None].repeat(1, 1, 1, 2)
    calls = [
        ("rms_norm_forward", (x.transpose(1, 2), weight, EPS, 0.0, torch.float64)),
        ("rms_norm_backward", (x, x, None, EPS, 1.0, True)),
        ("gated_norm", (x, x, weight, EPS, 8, "silu", False, torch.float64)),
        ("gated_norm_backward", (x, x, x, weight, each, "sigmoid", True, True)),
        ("gated_norm_backward", (x, x, x, weight, each, "silu", False, False)),
        ("gated_backward_", (*torch.randn(3, 2, 8, device=device), "silu")),
        ("gated_backward_", (torch.randn(2, 4, device=device), x[0, 0, :2], None, "gelu_tanh")),
        ("rotate", (x, x[:, :0], cos, sin, torch.float64, True, False, False)),
        ("rotate", (x, x[:, :1], cos, sin, torch.float32, True, True, True)),
    ]
    for name, arguments in calls:
        overload = getattr(torch.ops.liger_patch, name).default
        torch.library.opcheck(overload, arguments, test_utils=("test_schema", "test_faketensor"))
