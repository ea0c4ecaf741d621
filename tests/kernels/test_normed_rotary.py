"""Norms of queries and keys with their rotary embedding: results and every gradient against
float64, and the same bits as the two operators apart.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, product

import pytest
import torch
from eager_layers import EPS, gemma_norm, llama_norm, rotated, tables
from layer_checks import check, results_and_gradients
from slow_cases import slow_but
from three_ways import LOW_DTYPES
from torch import Tensor

from liger_patch.kernels.normed_rotary import _normed_rotary_backward, normed_rotary
from liger_patch.kernels.rms_norm import rms_norm
from liger_patch.kernels.rotary import rotary

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # in memory, of (B, num_heads, T, D)
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "heads first": lambda x: x.contiguous(),
    "with gaps": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "features apart": lambda x: x.mT.contiguous().mT,
}


def heads_of(size: int, *, tokens: int = 5, weights: bool = True) -> dict[str, Tensor]:
    """9 heads are more than a tile holds, 3 are not as many as it has room for."""
    inputs = {"q": torch.randn(2, 9, tokens, size) * 3, "k": torch.randn(2, 3, tokens, size)}
    if weights:
        inputs |= {"q_weight": torch.randn(size), "k_weight": torch.randn(size)}
    return inputs


def apart(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    offset: float,
    norm_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    q, k = (
        rms_norm(x, weight, EPS, offset=offset, dtype=norm_dtype)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return rotary(q, k, cos, sin)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("layout", slow_but(["tokens first", "heads first"], LAYOUTS))
@pytest.mark.parametrize("turned", [16, 10], ids=["all", "partly"])
@pytest.mark.parametrize(
    "dtype", slow_but([torch.bfloat16, torch.float64], [*LOW_DTYPES, torch.float64]), ids=str
)
def test_normed_rotary(offset, layout, turned, dtype, device):
    inputs = {name: value.to(device, dtype) for name, value in heads_of(16).items()}
    cos, sin = (each.to(device, dtype) for each in tables((2, 5, turned), "any order"))
    norm = gemma_norm if offset else llama_norm

    def ours(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (LAYOUTS[layout](x) for x in (q, k))
        return normed_rotary(q, k, q_weight, k_weight, cos, sin, EPS, offset=offset)

    def eager(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
        c, s = cos.to(q.dtype), sin.to(q.dtype)
        return rotated(norm(q, q_weight), c, s), rotated(norm(k, k_weight), c, s)

    check(ours, eager, inputs)


@pytest.mark.parametrize("kind", ["packed", "shared"])
def test_normed_rotary_of_frozen_weights(kind, device):
    inputs = {n: x.to(device, torch.bfloat16) for n, x in heads_of(24, weights=False).items()}
    cos, sin = (each.to(device, torch.bfloat16) for each in tables((2, 5, 24), kind))
    q_weight, k_weight = torch.randn(2, 24, device=device, dtype=torch.bfloat16)

    def eager(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        c, s, of_q, of_k = (each.to(q.dtype) for each in (cos, sin, q_weight, k_weight))
        return rotated(llama_norm(q, of_q), c, s), rotated(llama_norm(k, of_k), c, s)

    check(lambda q, k: normed_rotary(q, k, q_weight, k_weight, cos, sin, EPS), eager, inputs)


def test_normed_rotary_without_weights(device):
    inputs = {n: x.to(device, torch.bfloat16) for n, x in heads_of(16, weights=False).items()}
    cos, sin = (each.to(device, torch.bfloat16) for each in tables((2, 5, 16), "shared"))
    ones = torch.ones(16, device=device)

    def eager(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        c, s, one = (each.to(q.dtype) for each in (cos, sin, ones))
        return rotated(llama_norm(q, one), c, s), rotated(llama_norm(k, one), c, s)

    check(lambda q, k: normed_rotary(q, k, None, None, cos, sin, EPS), eager, inputs)


FORMS = {  # dtypes of q, weight, norm, cos; D, R, offset
    "Qwen3": (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16, 128, 128, 0.0),
    "Gemma 3": (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16, 256, 256, 1.0),
    "float16": (torch.float16, torch.float16, torch.float16, torch.float16, 64, 64, 0.0),
    "partly": (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16, 256, 64, 1.0),
    "wider weights": (torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, 128, 128, 0.0),
    "wider tables": (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32, 128, 128, 1.0),
    "float32": (torch.float32, torch.float32, torch.float32, torch.float32, 128, 96, 0.0),
}


@pytest.mark.parametrize(
    ("form", "layout"),
    slow_but(
        list(zip(FORMS, cycle(["tokens first", "heads first"]))),
        list(product(FORMS, ["tokens first", "heads first"])),
    ),
)
def test_the_bits_are_those_of_norms_and_rotation_apart(form, layout, device):
    """Of all but the weights' gradients, which are sums of the same numbers in another order.

    Where a norm or a table is float32 no product is rounded before it is added: a GPU's compiler
    joins one of the two to the addition, and not the same one in every kernel.
    """
    dtype, weight_dtype, norm_dtype, table_dtype, size, turned, offset = FORMS[form]
    inputs = heads_of(size, tokens=11)
    weights = {"q_weight", "k_weight"}
    inputs = {n: x.to(device, weight_dtype if n in weights else dtype) for n, x in inputs.items()}
    cos, sin = (each.to(device, table_dtype) for each in tables((2, 11, turned), "any order"))

    def ours(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
        heads = LAYOUTS[layout](q), LAYOUTS[layout](k), q_weight, k_weight
        return normed_rotary(*heads, cos, sin, EPS, offset=offset, norm_dtype=norm_dtype)

    def theirs(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
        heads = LAYOUTS[layout](q), LAYOUTS[layout](k), q_weight, k_weight
        return apart(*heads, cos, sin, offset, norm_dtype)

    our, their = (results_and_gradients(way, inputs) for way in (ours, theirs))
    for name, value in their.items():
        got = our[name]
        assert got is not None
        assert value is not None
        assert got.dtype == value.dtype
        if name in weights:
            continue
        if device.type == "cpu" or dtype == weight_dtype == table_dtype != torch.float32:
            assert torch.equal(got, value), name
        else:
            rounding = torch.finfo(torch.float32).eps * value.abs().max().item()
            rtol = torch.finfo(value.dtype).eps
            torch.testing.assert_close(got, value, rtol=rtol, atol=2 * rounding, msg=name)


def test_results_lie_as_those_of_rotary(device):
    q, k, *_ = (x.to(device) for x in heads_of(16).values())
    cos, sin = (each.to(device) for each in tables((2, 5, 16), "shared"))
    ours, theirs = normed_rotary(q, k, None, None, cos, sin, EPS), rotary(q, k, cos, sin)
    assert [each.stride() for each in ours] == [each.stride() for each in theirs]


def test_normed_rotary_gives_only_the_gradients_that_are_wanted(device):
    q, k, q_weight, k_weight = (x.to(device) for x in heads_of(8).values())
    cos, sin = (each.to(device) for each in tables((2, 5, 8), "shared"))
    for wanted in (
        (True, True, False, False),
        (False, True, True, False),
        (True, False, True, True),
    ):
        leaves = [
            each.clone().requires_grad_(bool(wants))
            for each, wants in zip((q, k, q_weight, k_weight), wanted, strict=True)
        ]
        a, b = normed_rotary(*leaves, cos, sin, EPS)
        (a.sum() + b.sum()).backward()
        assert tuple(each.grad is not None for each in leaves) == wanted
    with torch.no_grad():
        assert not normed_rotary(*leaves, cos, sin, EPS)[0].requires_grad


def test_the_gradients_of_frozen_weights_are_not_computed(device):
    q, k, q_weight, k_weight = (x.to(device) for x in heads_of(8).values())
    cos, sin = (each.to(device) for each in tables((2, 5, 8), "shared"))
    rstds = (torch.rand(2, 5, heads, device=device) for heads in (9, 3))
    arguments = (q, k, q, k, q_weight, k_weight, cos, sin, *rstds, 0.0, torch.float32, False)
    assert not _normed_rotary_backward(*arguments)[2].numel()


def test_one_gradient_of_two_results_is_enough(device):
    inputs = {name: x.to(device, torch.bfloat16) for name, x in heads_of(128).items()}
    cos, sin = (each.to(device, torch.bfloat16) for each in tables((2, 5, 128), "packed"))

    def gradient(function: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        leaf = inputs["k"].clone().requires_grad_()
        heads = inputs["q"], leaf, inputs["q_weight"], inputs["k_weight"]
        return torch.autograd.grad(function(*heads)[1].square().sum(), leaf)[0]

    ours = gradient(lambda *heads: normed_rotary(*heads, cos, sin, EPS, offset=1.0))
    theirs = gradient(lambda *heads: apart(*heads, cos, sin, 1.0))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(2, 3, 0, 8), (0, 3, 5, 8), (2, 0, 5, 8)], ids=str)
def test_normed_rotary_of_no_row(shape, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(8, device=device, requires_grad=True)
    cos, sin = torch.randn(2, 1, shape[2], 8, device=device)
    results = normed_rotary(x, x, weight, weight, cos, sin, EPS)
    sum(each.sum() for each in results).backward()
    assert [each.shape for each in results] == [x.shape, x.shape]
    assert x.grad is not None
    assert weight.grad is not None
    assert not weight.grad.any()


def test_heads_of_more_features_than_the_kernel_takes(device):
    inputs = {"q": torch.randn(1, 2, 3, 1100), "k": torch.randn(1, 1, 3, 1100)}
    inputs = {name: value.to(device) for name, value in inputs.items()}
    cos, sin = (each.to(device) for each in tables((1, 3, 1100), "shared"))
    our, their = (
        results_and_gradients(lambda q, k, f=f: f(q, k, None, None, cos, sin), inputs)
        for f in (lambda *each: normed_rotary(*each, EPS), lambda *each: apart(*each, 0.0))
    )
    for name, value in their.items():
        assert value is not None
        assert torch.equal(our[name], value), name  # pyright: ignore[reportArgumentType]
