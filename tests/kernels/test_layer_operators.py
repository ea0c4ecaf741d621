"""What the operators of all layers have in common: what they need, refuse, and are to torch."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from liger_patch.kernels.gated import gated
from liger_patch.kernels.gated_mlp import gated_mlp
from liger_patch.kernels.gated_norm import gated_norm
from liger_patch.kernels.lora.projection import LoraProjection
from liger_patch.kernels.rms_norm import rms_norm
from liger_patch.kernels.rotary import rotary

EPS = 1e-5
OPERATORS = ["rms_norm", "gated", "gated_norm", "halves", "gated_mlp", "rotary"]
TRACED = ["rms_norm", "gated", "gated_norm", "rotary"]
IN_SLICES = ["gated_mlp in slices", "lora_mlp in slices"]


def test_nothing_of_triton_is_needed_where_it_serves_nothing(monkeypatch):
    for name in TRACED:
        monkeypatch.setitem(sys.modules, f"liger_patch.kernels.triton.{name}", None)
    monkeypatch.setattr("liger_patch.kernels.backend.HAS_TRITON", False)
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    turned = rotary(x, x, *torch.randn(2, 1, 3, 4))[0]
    y = rms_norm(x, None, EPS) + gated(x, x) + turned + gated_norm(x, x, x[0, 0, 0], EPS)
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("operator", ["rms_norm", "gated", "rotary"])
def test_a_second_derivative_is_refused(operator, device):
    x = torch.randn(1, 2, 3, 4, device=device, requires_grad=True)
    tables = torch.randn(2, 1, 3, 4, device=device)
    y = {
        "rms_norm": lambda: rms_norm(x, None, EPS),
        "gated": lambda: gated(x, x),
        "rotary": lambda: rotary(x, x, *tables)[0],
    }[operator]()
    with pytest.raises(RuntimeError, match=operator):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize("made", ["as products leave it", "with gaps"])
@pytest.mark.parametrize("operator", [*OPERATORS, "lora_mlp", *IN_SLICES])
def test_results_may_be_written_to(operator, made, device):
    x = torch.randn(2, 5, 3, 16, device=device)
    x = (x[..., :8] if made == "with gaps" else x).transpose(1, 2).requires_grad_()
    weight = torch.randn(x.shape[-1], x.shape[-1], device=device)
    tables = torch.randn(2, 2, 5, x.shape[-1], device=device)
    part = LoraProjection(weight, None, weight[:4], weight[:, :4], 1.0)
    call = {
        "rms_norm": lambda: rms_norm(x, weight[0], EPS),
        "gated": lambda: gated(x, 2 * x),
        "gated_norm": lambda: gated_norm(x, 2 * x, weight[0], EPS, group_size=4),
        "halves": lambda: gated(x),
        "gated_mlp": lambda: gated_mlp(x, weight, weight, weight),
        "gated_mlp in slices": lambda: gated_mlp(x, weight, weight, weight, slice_tokens=4),
        "lora_mlp": lambda: gated_mlp(x, part, part, part),
        "lora_mlp in slices": lambda: gated_mlp(x, part, part, part, slice_tokens=4),
        "rotary": lambda: rotary(x, x[:, :2], *tables)[0],
    }[operator]
    written = call()
    written.mul_(3.0)
    ours, expected = (torch.autograd.grad(y.sum(), x) for y in (written, 3.0 * call()))
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("strides", ["contiguous", "the other way round"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_hooks_may_give_saved_tensors_other_strides(operator, strides, device):
    """As those that offload them do."""

    def unpacked(tensor: Tensor) -> Tensor:
        if strides == "contiguous" or tensor.dim() == 2:  # weights, whose products round otherwise
            return tensor.contiguous()
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    made = torch.randn(2, 5, 3, 8, device=device)
    weights = [torch.randn(8, 8, device=device) for _ in range(3)]
    tables = torch.randn(2, 2, 5, 8, device=device)

    def gradient(unpack: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = made.clone().requires_grad_()
        x = leaf.transpose(1, 2)  # heads in front of tokens
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            y = {
                "rms_norm": lambda: rms_norm(x, weights[0][0], EPS),
                "gated": lambda: gated(x, 2 * x),
                "gated_norm": lambda: gated_norm(x, 2 * x, weights[0][0], EPS, group_size=4),
                "halves": lambda: gated(x),
                "gated_mlp": lambda: gated_mlp(x, *weights),
                "rotary": lambda: rotary(x, x, *tables)[0],
            }[operator]()
        return torch.autograd.grad(y.square().sum(), leaf)[0]

    torch.testing.assert_close(gradient(unpacked), gradient(lambda tensor: tensor))


X = torch.zeros(2, 8)
Q = torch.zeros(2, 3, 5, 8)
C = torch.zeros(1, 5, 8)
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "grouped": (
        lambda: rotary(Q, Q, C, C, grouped=True),
        "grouped must be False where interleaved is, got True",
    ),
    "x of integers": (lambda: rms_norm(X.long(), None, EPS), r"x must be floating point"),
    "dtype": (lambda: rms_norm(X, None, EPS, dtype=torch.int32), r"dtype .* got torch.int32"),
    "weight": (lambda: rms_norm(X, X[0, :3], EPS), r"weight must have shape \(8,\), got \(3,\)"),
    "device": (lambda: rms_norm(X, X[0].to("meta"), EPS), "weight must be on cpu"),
    "eps": (lambda: rms_norm(X, None, -1.0), "eps must be a number >= 0, got -1.0"),
    "eps, text": (lambda: rms_norm(X, None, "1"), "eps must be a number >= 0, got '1'"),
    "eps, a tensor": (lambda: rms_norm(X, None, torch.tensor(1.0)), "eps must be a number >= 0"),
    "eps, nan": (lambda: rms_norm(X, None, float("nan")), "eps must be a number >= 0, got nan"),
    "offset": (
        lambda: rms_norm(X, None, EPS, offset=None),
        "offset must be a number, got None",
    ),
    "weight of int": (
        lambda: rms_norm(X, X[0].int(), EPS),
        "weight must be floating point, got torch.int32",
    ),
    "activation": (lambda: gated(X, X, activation="relu"), "activation must be one of"),
    "gate": (lambda: gated(X.long(), X), "gate must be floating point"),
    "halves": (lambda: gated(X[:, :7]), r"gate without up must be \(..., 2 I\), got \(2, 7\)"),
    "up": (lambda: gated(X, X[:1]), r"up must have the shape of gate, \(2, 8\), got \(1, 8\)"),
    "up's dtype": (lambda: gated(X, X.half()), "up must have the dtype of gate"),
    "q": (lambda: rotary(X, Q, C, C), "q must be floating point"),
    "k": (lambda: rotary(Q, Q[:, :, :2], C, C), "k must be"),
    "rotary's dtype": (lambda: rotary(Q, Q, C, C, dtype=torch.int32), "dtype .* got torch.int32"),
    "cos": (lambda: rotary(Q, Q, C[:, :2], C), "cos must have shape"),
    "odd": (lambda: rotary(Q, Q, C[..., :3], C[..., :3]), "cos must have an even R"),
    "too many": (lambda: rotary(Q[..., :4], Q[..., :4], C, C), "cos must have an even R"),
    "pairs": (
        lambda: rotary(Q, Q, C, C, interleaved=True),
        r"cos must have an even R of at most 8 features, got \(1, 5, 8\), 16 features",
    ),
    "sin": (
        lambda: rotary(Q, Q, C, C[..., :4]),
        r"sin must have shape \(1, 5, 8\) as cos has, got \(1, 5, 4\)",
    ),
    "complex cos": (lambda: rotary(Q, Q, C * 1j, C), "cos must be floating point, got .*complex64"),
    "sin of bool": (lambda: rotary(Q, Q, C, C > 0), "sin must be floating point, got torch.bool"),
    "k's device": (lambda: rotary(Q, Q.to("meta"), C, C), "k must be on cpu"),
    "a gradient": (lambda: rotary(Q, Q, C.clone().requires_grad_(), C), "cos must not require"),
    "sin's device": (lambda: rotary(Q, Q, C, C.to("meta")), "sin must be on cpu"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_an_error_that_names_it(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("operator", TRACED)
def test_traces_hold_operators_with_their_gradients(operator, device):
    """Not what a kernel's launcher does around a launch, which no trace sees."""
    x, other = torch.randn(2, 2, 3, 5, 8, device=device)
    tables = torch.randn(2, 1, 5, 8, device=device)

    def gradient(x: Tensor) -> Tensor:
        leaf = x.requires_grad_()
        y = {
            "rms_norm": lambda: rms_norm(leaf, None, EPS),
            "gated": lambda: gated(leaf, leaf),
            "gated_norm": lambda: gated_norm(leaf, leaf, tables[0, 0, 0], EPS),
            "rotary": lambda: rotary(leaf, leaf, *tables)[0],
        }[operator]()
        return torch.autograd.grad(y.square().sum(), leaf)[0]

    traced = make_fx(gradient)(x)
    name = "rotate" if operator == "rotary" else operator
    assert sum(node.name.startswith(name) for node in traced.graph.nodes) == 2
    torch.testing.assert_close(traced(other), gradient(other))
    leaf = other.clone().requires_grad_()
    again = traced(leaf).square().sum()
    if operator == "rotary":  # linear, so its backward pass is an operator with a gradient too
        expected = 2 * gradient(gradient(other).detach())
        torch.testing.assert_close(torch.autograd.grad(again, leaf)[0], expected)
    else:
        with pytest.raises(RuntimeError, match="no autograd formula"):
            again.backward()


FORWARD = {
    "rms_norm": lambda x: rms_norm(x, None, EPS),
    "gated": lambda x: gated(x, x),
    "gated_norm": lambda x: gated_norm(x, x, x[0, 0, 0], EPS, group_size=4, gate_first=True),
    "halves": lambda x: gated(x),
    "rotary": lambda x: rotary(x, x, x[:, 0], x[:, 1])[0],
}


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # sizes are compared
@pytest.mark.parametrize("operator", FORWARD)
def test_traced_operators_compute_with_other_numbers(operator, device):
    x, other = torch.randn(2, 2, 3, 5, 8, device=device)
    traced = torch.jit.trace(FORWARD[operator], x)
    torch.testing.assert_close(traced(other), FORWARD[operator](other))


class Called(nn.Module):
    """The module of a function, which torch.export wants."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


RECORDERS: dict[str, Callable[[Callable, Tensor], Callable]] = {
    "make_fx": lambda function, x: make_fx(function)(x),
    "jit": torch.jit.trace,
    "export": lambda function, x: torch.export.export(
        Called(function), (x,), strict=False
    ).module(),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:.*get_attr")  # torch 2.6
@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("operator", TRACED)
def test_a_recorded_forward_pass_has_the_gradients_of_the_call(operator, recorder, device):
    x, other = torch.randn(2, 2, 3, 5, 8, device=device)
    cos, sin = torch.randn(2, 1, 5, 8, device=device)
    function = {
        "rms_norm": lambda x: rms_norm(x, x[0, 0, 0], EPS, offset=1.0),
        "gated": lambda x: gated(x, x.flip(0)),
        "gated_norm": lambda x: gated_norm(x, x.flip(0), x[0, 0, 0], EPS, group_size=4),
        "rotary": lambda x: torch.cat(rotary(x, x.flip(0)[:, :2], cos, sin), 1),
    }[operator]
    leaf = other.requires_grad_()

    def gradient(call: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(call(leaf).square().sum(), leaf)[0]

    torch.testing.assert_close(gradient(RECORDERS[recorder](function, x)), gradient(function))


@pytest.mark.parametrize("operator", ["rms_norm", "gated"])
def test_operators_run_on_shards_that_a_mode_watches(operator):
    """As tensor parallelism makes them: an operator has no rule of its own for them."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = torch.randn(2, 3, 5, 8)
        with FlopCounterMode(display=False):
            y = FORWARD[operator](DTensor.from_local(x, mesh, [Shard(1)]))
        torch.testing.assert_close(y.to_local(), FORWARD[operator](x))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("operator", FORWARD)
def test_operators_run_on_tensors_without_values(operator, device):
    x = torch.randn(2, 3, 5, 8, device=device)
    with FakeTensorMode() as mode:
        y = FORWARD[operator](mode.from_tensor(x))
    expected = FORWARD[operator](x)
    assert (y.shape, y.stride(), y.dtype) == (expected.shape, expected.stride(), expected.dtype)


@pytest.mark.parametrize("operator", TRACED)
def test_operators_are_what_torch_says_an_operator_is(operator, device):
    x, weight = torch.randn(2, 3, 5, 8, device=device), torch.randn(8, device=device)
    cos, sin = torch.randn(2, 1, 5, 8, device=device)
    rstd, pairs = torch.rand(x.shape[:-1], device=device), cos[..., ::2]
    each = rstd[..., None].repeat(1, 1, 1, 2)
    calls = {
        "rms_norm": [
            ("rms_norm_forward", (x.transpose(1, 2), weight, EPS, 0.0, torch.float32)),
            ("rms_norm_backward", (x, x, weight, EPS, 1.0, True)),
            ("rms_norm_backward", (x, x, None, EPS, 1.0, True)),
        ],
        "gated": [
            ("gated_forward", (x, x, "silu")),
            ("gated_forward", (x, None, "silu")),
            ("gated_backward", (x, x, x, "gelu_tanh")),
            ("gated_backward", (x[..., :4], x, None, "gelu_tanh")),
        ],
        "gated_norm": [
            ("gated_norm", (x, x, weight, EPS, 4, "silu", False, torch.float32)),
            ("gated_norm_backward", (x, x, x, weight, each, "sigmoid", True, True)),
            ("gated_norm_backward", (x, x, x, weight, each, "silu", False, False)),
        ],
        "rotary": [
            ("rotate", (x, x[:, :2], cos, sin, torch.float32, False, False, True)),
            ("rotate", (x, x[:, :0], pairs, pairs, torch.float64, True, False, False)),
            ("rotate", (x, x[:, :1], pairs, pairs, torch.float32, True, True, True)),
        ],
    }
    for name, arguments in calls[operator]:
        overload = getattr(torch.ops.liger_patch, name).default
        torch.library.opcheck(overload, arguments, test_utils=("test_schema", "test_faketensor"))
