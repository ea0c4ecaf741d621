"""Norms, gates and rotary embeddings: results and every gradient against float64, no worse than
what the models compute in the same dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from layer_checks import ACTIVATIONS, check
from three_ways import LOW_DTYPES
from torch import Tensor

from liger_patch.kernels.gated import gated
from liger_patch.kernels.rms_norm import rms_norm
from liger_patch.kernels.rotary import rotary
from liger_patch.kernels.rows import empty_in_order, in_order_of

EPS = 1e-5
ROWS = {
    "one": (1, 3),
    "aligned": (64, 128),
    "unaligned": (13, 37),
    "heads": (2, 3, 5, 16),
    "two blocks": (5, 1100),
    "long": (3, 5000),
    "none": (0, 8),
}


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    normed = wide(x) * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normed.to(x.dtype)


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    normed = wide(x) * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + EPS)
    return (normed * (1.0 + wide(weight))).type_as(x)


@pytest.mark.parametrize("shape", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("dtype", [*LOW_DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(shape, dtype, offset, device):
    inputs = {"x": torch.randn(shape) * 3, "weight": torch.randn(shape[-1])}
    inputs = {name: value.to(device, dtype) for name, value in inputs.items()}
    eager = gemma_norm if offset else llama_norm
    check(lambda x, weight: rms_norm(x, weight, EPS, offset=offset), eager, inputs)


def test_rms_norm_of_one_feature(device):
    """Whose gradient is nothing but rounding, in eager too."""
    x, weight = torch.randn(5, 1, device=device), torch.randn(1, device=device)
    expected = llama_norm(x.double(), weight.double())
    torch.testing.assert_close(rms_norm(x, weight, EPS), expected.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_of_a_wider_weight_has_its_dtype(dtype, device):
    x, weight = torch.randn(7, 24, device=device, dtype=dtype), torch.randn(24, device=device)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, EPS, dtype=torch.promote_types(x.dtype, weight.dtype))

    check(ours, llama_norm, {"x": x, "weight": weight})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_rms_norm_without_a_weight(dtype, device):
    x = torch.randn(9, 33, device=device, dtype=dtype)
    ones = torch.ones(33, device=device, dtype=dtype)
    check(lambda x: rms_norm(x, None, EPS), lambda x: llama_norm(x, ones), {"x": x})


VIEWS = {
    "transposed": lambda x: x.transpose(1, 2),
    "columns": lambda x: x.transpose(2, 3),
    "sliced": lambda x: x[..., ::2],
    "expanded": lambda x: x[:, :1].expand(2, 6, 5, 16),
    "alone": lambda x: x[:1].transpose(1, 2).as_strided((1, 5, 6, 16), (7, 16, 80, 1)),
    # where another dimension has a stride of 1 too
    "windows": lambda x: x.flatten().unfold(0, 16, 1)[:9],
    "expanded beside one": lambda x: (
        x.flatten()[:12].view(2, 6, 1, 1).transpose(1, 3).expand(2, 1, 3, 6)
    ),
}


@pytest.mark.parametrize("made", VIEWS)
def test_rms_norm_of_any_strides(made, device):
    x = torch.randn(2, 6, 5, 16, device=device, dtype=torch.bfloat16)
    view = VIEWS[made]
    weight = torch.randn(view(x).shape[-1], device=device, dtype=torch.bfloat16)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        y = rms_norm(view(x), weight, EPS)
        if made == "transposed":  # heads stay in front of tokens without a copy
            assert y.stride() == view(x).stride()
        return y

    check(ours, lambda x, weight: llama_norm(view(x), weight), {"x": x, "weight": weight})


@pytest.mark.parametrize("least", [0, 40])  # elements: of rstd fewer, of x more
@pytest.mark.parametrize("made", ["transposed", "columns"])
def test_rms_norm_whose_saved_tensors_come_back_in_another_order(made, least, device):
    """As hooks that offload them do: all, or large ones only."""
    x = torch.randn(2, 4, 3, 16, device=device)
    weight = torch.randn(VIEWS[made](x).shape[-1], device=device)

    def unpacked(tensor: Tensor) -> Tensor:
        return tensor.contiguous() if tensor.numel() > least else tensor

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpacked):
            return rms_norm(VIEWS[made](x), weight, EPS)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return llama_norm(VIEWS[made](x), weight)

    check(ours, plain, {"x": x, "weight": weight})


@pytest.mark.parametrize("made", VIEWS)
def test_rows_in_another_order_are_copied_and_no_others(made):
    x = VIEWS[made](torch.randn(2, 6, 5, 16))
    result = empty_in_order(x, torch.float64)
    assert result.shape == x.shape
    assert torch.empty_like(result).stride() == result.stride()  # it is dense
    others = [x, x.clone(memory_format=torch.contiguous_format), x.mT.contiguous().mT]
    for other in others:
        ordered = in_order_of(result, other)
        assert ordered.stride() == result.stride()
        assert torch.equal(ordered, other)
    in_order = torch.empty_like(result, dtype=x.dtype)
    assert in_order_of(result, in_order) is in_order
    alone = in_order[:1]
    odd = alone.as_strided(alone.shape, (7, *alone.stride()[1:]))  # nothing is 7 elements apart
    assert in_order_of(alone, odd) is odd


@pytest.mark.parametrize("made", ["sliced", "expanded"])
def test_rms_norm_of_a_weight_of_any_strides(made, device):
    x = torch.randn(5, 16, device=device)
    whole = torch.randn(16, 2, device=device) if made == "sliced" else torch.randn(1, device=device)

    def view(weight: Tensor) -> Tensor:
        return weight[:, 0] if made == "sliced" else weight.expand(16)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, view(weight), EPS)

    check(ours, lambda x, weight: llama_norm(x, view(weight)), {"x": x, "weight": whole})


def test_rms_norm_gives_only_the_gradients_that_are_wanted(device):
    x, weight = torch.randn(5, 16, device=device), torch.randn(16, device=device)
    for wants_x, wants_weight in ((True, False), (False, True)):
        a = x.clone().requires_grad_(wants_x)
        b = weight.clone().requires_grad_(wants_weight)
        rms_norm(a, b, EPS).sum().backward()
        assert (a.grad is not None, b.grad is not None) == (wants_x, wants_weight)
    with torch.no_grad():
        assert not rms_norm(a, b, EPS).requires_grad


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1,), (64, 128), (3, 5, 37), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", [*LOW_DTYPES, torch.float64], ids=str)
def test_gated(activation, shape, dtype, device):
    inputs = {name: (torch.randn(shape) * 4).to(device, dtype) for name in ("gate", "up")}
    act = ACTIVATIONS[activation]
    check(
        lambda gate, up: gated(gate, up, activation=activation),
        lambda gate, up: act(gate) * up,
        inputs,
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(2,), (64, 256), (3, 5, 74), (7, 4200), (0, 4), (3, 0)], ids=str)
@pytest.mark.parametrize("dtype", [*LOW_DTYPES, torch.float64], ids=str)
def test_gated_of_halves_of_one_tensor(activation, shape, dtype, device):
    act = ACTIVATIONS[activation]
    check(
        lambda both: gated(both, activation=activation),
        lambda both: act(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1],
        {"both": (torch.randn(shape) * 4).to(device, dtype)},
    )


@pytest.mark.parametrize("made", ["transposed", "sliced", "expanded", "chunked"])
def test_gated_of_any_strides(made, device):
    act = ACTIVATIONS["silu"]
    x = torch.randn(4, 6, 48, device=device, dtype=torch.bfloat16)
    view = {
        "transposed": lambda x: x.transpose(0, 1),
        "sliced": lambda x: x[..., ::2],
        "expanded": lambda x: x[:, :1].expand(4, 6, 48),
        "chunked": lambda x: x.chunk(2, -1)[1],
    }[made]

    def eager(x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = view(x).chunk(2, -1)
        return act(gate) * up, act(view(x)) * view(x)

    check(lambda x: (gated(view(x)), gated(view(x), view(x))), eager, {"x": x})


def test_nothing_is_copied_for_halves_of_one_tensor(device):
    both = torch.randn(3, 5, 32, device=device, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated(both).sum().backward()
    assert [t.data_ptr() for t in saved] == [both.data_ptr()]
    assert both.grad is not None


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_far_from_zero_is_finite(activation, device):
    gate = torch.tensor([-60.0, -40.0, 0.0, 40.0, 60.0], device=device, requires_grad=True)
    y = gated(gate, torch.ones_like(gate), activation=activation)
    (slope,) = torch.autograd.grad(y.sum(), gate)
    torch.testing.assert_close(y, gate.detach().clamp(min=0))
    torch.testing.assert_close(slope, torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0], device=device))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Transformers does it, partly too."""
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    across = torch.cat((-second, first), -1)
    return torch.cat((turned * cos[:, None] + across * sin[:, None], rest), -1)


def tables(shape: tuple[int, ...], kind: str) -> tuple[Tensor, Tensor]:
    """cos and sin of positions that restart, come in no order, or are shared by all sequences."""
    batch, tokens, size = shape
    positions = torch.arange(tokens).expand(batch, -1)
    if kind == "packed":
        positions = positions % 3
    if kind == "any order":
        positions = torch.stack([torch.randperm(tokens) for _ in range(batch)])
    if kind == "shared":
        positions = positions[:1]
    frequencies = 1.0 / 100 ** (torch.arange(0, size, 2) / size)
    angles = positions[..., None] * frequencies
    both = torch.cat((angles, angles), -1)
    return both.cos(), both.sin()


@pytest.mark.parametrize("kind", ["packed", "any order", "shared", "of no pair"])
@pytest.mark.parametrize("turned", [16, 10], ids=["all", "partly"])
@pytest.mark.parametrize("dtype", [*LOW_DTYPES, torch.float64], ids=str)
def test_rotary(kind, turned, dtype, device):
    # tokens in front of heads, as products give them; 9 heads are more than a program holds
    inputs = {"q": torch.randn(2, 5, 9, 16), "k": torch.randn(2, 5, 3, 16)}
    inputs = {name: value.to(device, dtype) for name, value in inputs.items()}
    cos, sin = tables((2, 5, turned), kind)
    if kind == "of no pair":  # the halves of cos and sin differ
        cos, sin = torch.randn(2, 2, 5, turned)
    cos, sin = cos.to(device, dtype), sin.to(device, dtype)

    def eager(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        c, s = cos.to(q.dtype), sin.to(q.dtype)
        return rotated(q.transpose(1, 2), c, s), rotated(k.transpose(1, 2), c, s)

    check(lambda q, k: rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin), eager, inputs)


def rotated_beside(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As Cohere's and GLM's models do it, partly too: the pairs are neighbours."""
    turned, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    across = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    cos, sin = (t.repeat_interleave(2, -1)[:, None] for t in (cos, sin))
    return torch.cat((turned * cos + across * sin, rest), -1)


@pytest.mark.parametrize("kind", ["any order", "shared"])
@pytest.mark.parametrize("turned", [16, 10], ids=["all", "partly"])
@pytest.mark.parametrize("dtype", [*LOW_DTYPES, torch.float64], ids=str)
def test_rotary_of_interleaved_pairs(kind, turned, dtype, device):
    inputs = {"q": torch.randn(2, 5, 9, 16), "k": torch.randn(2, 5, 3, 16)}
    inputs = {name: value.to(device, dtype) for name, value in inputs.items()}
    # one of two angles, in memory beside others
    cos, sin = (t.to(device, dtype)[..., : turned // 2] for t in tables((2, 5, turned), kind))
    sin = torch.stack((sin, sin), -1)[..., 0]

    def eager(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        c, s = cos.to(q.dtype), sin.to(q.dtype)
        return rotated_beside(q.transpose(1, 2), c, s), rotated_beside(k.transpose(1, 2), c, s)

    def ours(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved=True)

    check(ours, eager, inputs)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [*LOW_DTYPES, torch.float64], ids=str)
def test_rotary_without_keys(interleaved, dtype, device):
    q = torch.randn(2, 5, 3, 8, device=device, dtype=dtype)
    cos, sin = (t.to(device, dtype) for t in tables((2, 5, 8), "any order"))
    if interleaved:
        cos, sin = cos[..., :4], sin[..., :4]
    eager = rotated_beside if interleaved else rotated
    check(
        lambda q: rotary(q.transpose(1, 2), None, cos, sin, interleaved=interleaved)[0],
        lambda q: eager(q.transpose(1, 2), cos.to(q.dtype), sin.to(q.dtype)),
        {"q": q},
    )
    assert rotary(q, None, cos[:, :3], sin[:, :3], interleaved=interleaved)[1].shape == (2, 0, 3, 8)


def test_rotary_of_wider_tables_has_their_dtype(device):
    q = torch.randn(1, 4, 6, 8, device=device, dtype=torch.bfloat16)
    cos, sin = (each.to(device) for each in tables((1, 6, 8), "shared"))
    check(
        lambda q: rotary(q, q, cos, sin)[0],
        lambda q: rotated(q, cos.to(torch.promote_types(q.dtype, torch.float32)), sin),
        {"q": q},
    )


def test_rotary_of_float64_tables_is_computed_in_float64(device):
    q = torch.randn(1, 4, 6, 8, device=device)
    cos, sin = (each.to(device, torch.float64) for each in tables((1, 6, 8), "shared"))
    result = rotary(q, q, cos, sin)[0]
    torch.testing.assert_close(result, rotated(q.double(), cos, sin))
    assert result.dtype == torch.float64


def test_rotary_of_no_token(device):
    empty = torch.randn(2, 3, 0, 8, device=device)
    assert rotary(empty, empty, *torch.randn(2, 1, 0, 8, device=device))[0].shape == empty.shape


def test_nothing_of_triton_is_needed_where_it_serves_nothing(monkeypatch):
    for name in ("rms_norm", "gated", "rotary"):
        monkeypatch.setitem(sys.modules, f"liger_patch.kernels.{name}_triton", None)
    monkeypatch.setattr("liger_patch.kernels.backend.HAS_TRITON", False)
    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    turned = rotary(x, x, *torch.randn(2, 1, 3, 4))[0]
    (rms_norm(x, None, EPS) + gated(x, x) + turned).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("operator", ["rms_norm", "gated", "rotary"])
def test_a_second_derivative_is_refused(operator, device):
    x = torch.randn(1, 2, 3, 4, device=device, requires_grad=True)
    y = {
        "rms_norm": lambda: rms_norm(x, None, EPS),
        "gated": lambda: gated(x, x),
        "rotary": lambda: rotary(x, x, *torch.randn(2, 1, 3, 4, device=device))[0],
    }[operator]()
    with pytest.raises(RuntimeError, match=operator):
        torch.autograd.grad(y.sum(), x, create_graph=True)


X = torch.zeros(2, 8)
Q = torch.zeros(2, 3, 5, 8)
C = torch.zeros(1, 5, 8)
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "x of integers": (lambda: rms_norm(X.long(), None, EPS), r"x must be floating point"),
    "dtype": (lambda: rms_norm(X, None, EPS, dtype=torch.int32), r"dtype .* got torch.int32"),
    "weight": (lambda: rms_norm(X, X[0, :3], EPS), r"weight must have shape \(8,\), got \(3,\)"),
    "device": (lambda: rms_norm(X, X[0].to("meta"), EPS), "weight must be on cpu"),
    "eps": (lambda: rms_norm(X, None, -1.0), "eps must be a number >= 0, got -1.0"),
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
    "sin": (lambda: rotary(Q, Q, C, C[..., :4]), "sin must have an even R"),
    "k's device": (lambda: rotary(Q, Q.to("meta"), C, C), "k must be on cpu"),
    "a gradient": (lambda: rotary(Q, Q, C.clone().requires_grad_(), C), "cos must not require"),
    "sin's device": (lambda: rotary(Q, Q, C, C.to("meta")), "sin must be on cpu"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_an_error_that_names_it(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("operator", ["rms_norm", "gated", "rotary"])
def test_operators_are_what_torch_says_an_operator_is(operator, device):
    x, weight = torch.randn(2, 3, 5, 8, device=device), torch.randn(8, device=device)
    cos, sin = torch.randn(2, 1, 5, 8, device=device)
    rstd = torch.rand(x.shape[:-1], device=device)
    calls = {
        "rms_norm": [
            ("rms_norm", (x.transpose(1, 2), weight, EPS, 0.0, torch.float32)),
            ("rms_norm_backward", (x, x, weight, rstd, 1.0, True)),
            ("rms_norm_backward", (x, x, None, rstd, 1.0, True)),
        ],
        "gated": [
            ("gated_forward", (x, x, "silu")),
            ("gated_forward", (x, None, "silu")),
            ("gated_backward", (x, x, x, "gelu_tanh")),
            ("gated_backward", (x[..., :4], x, None, "gelu_tanh")),
        ],
        "rotary": [
            ("rotary", (x, x[:, :2], cos, sin, torch.float32, False, True)),
            ("rotary", (x, x[:, :0], cos[..., ::2], sin[..., 1::2], torch.float64, True, False)),
        ],
    }
    for name, arguments in calls[operator]:
        overload = getattr(torch.ops.liger_patch, name).default
        torch.library.opcheck(overload, arguments, test_utils=("test_schema", "test_faketensor"))
