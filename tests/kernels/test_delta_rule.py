"""Gated delta rules in chunks: results and every gradient against the recurrence, token by token,
in float64, no worse than chunks in float32, rounded once, that autograd differentiates.
"""

from collections.abc import Callable
from functools import partial

import delta_cases
import pytest
import torch
from layer_checks import check, gated_delta_rule
from slow_cases import slow_but
from torch import Tensor
from torch.nn.functional import normalize

from liger_patch.kernels import delta_rule
from liger_patch.kernels.delta_rule import CHUNK, L2_EPS

TOKENS = {"one": 1, "less than a chunk": 37, "a chunk": CHUNK, "three chunks": 2 * CHUNK + 5}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def cast(inputs: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """g and beta as the layers compute them: g is never narrower than float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return {n: x.to(device, wide if n == "g" else dtype) for n, x in inputs.items()}


@pytest.mark.parametrize("tokens", slow_but([1, 2 * CHUNK + 5], [*TOKENS.values()]), ids=TOKENS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("groups", "is_packed"), slow_but([(2, True)], [(1, False), (2, True), (2, False)])
)
def test_chunks_compute_the_recurrence(tokens, dtype, groups, is_packed, device):
    inputs = cast(delta_cases.inputs(tokens, groups=groups), device, dtype)
    ids = None
    if is_packed:  # boundaries within chunks, one token apart, at their ends and nowhere
        starts = [9, 10, CHUNK - 3, CHUNK + 9], [CHUNK, 2 * CHUNK]
        place = torch.arange(tokens)
        rows = [torch.bucketize(place, torch.tensor(row), right=True) for row in starts]
        ids = torch.stack(rows).to(device)
    both = (partial(each, sequence_ids=ids) for each in (gated_delta_rule, delta_cases.eager))
    check(*both, inputs)


EXTREMES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {  # a tensor, and what it becomes
    "strong decay": ("g", lambda g: 300.0 * g),
    "no decay": ("g", torch.zeros_like),
    "nothing written": ("beta", lambda beta: 1e-4 * beta),
    "all overwritten": ("beta", torch.ones_like),
    "reflected": ("beta", lambda beta: 2.0 * beta),  # as OLMo-Hybrid's negative eigenvalues
    "similar keys": ("k", lambda k: normalize(k[:, :1] + 0.5 * k, dim=-1)),
}


@pytest.mark.parametrize(
    "extreme", slow_but(["strong decay", "reflected", "similar keys"], [*EXTREMES])
)
@pytest.mark.parametrize("dtype", slow_but([torch.float16, torch.float64], DTYPES), ids=str)
def test_extremes_are_no_worse(extreme, dtype, device):
    inputs = delta_cases.inputs(CHUNK + 20, heads=1)
    name, changed = EXTREMES[extreme]
    inputs[name] = changed(inputs[name])
    check(gated_delta_rule, delta_cases.eager, cast(inputs, device, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_keys_that_are_nearly_equal_are_no_worse(dtype, device):
    """Powers of the matrix that is inverted grow to 1e17, the inverse does not. Without 16 bits:
    values that cancel to a 50th of themselves are rounded there on a GPU.
    """
    inputs = delta_cases.inputs(CHUNK + 20)
    inputs["k"] = normalize(inputs["k"][:, :1] + 0.02 * inputs["k"], dim=-1)
    inputs |= {"beta": torch.ones_like(inputs["beta"]), "g": 0.01 * inputs["g"]}
    check(gated_delta_rule, delta_cases.eager, cast(inputs, device, dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_queries_and_keys_are_normalized_first(dtype, device):
    inputs = delta_cases.inputs(CHUNK + 3, heads=1)
    for name in ("q", "k"):
        inputs[name] = (
            torch.randn_like(inputs[name]) * torch.logspace(-4, 1, CHUNK + 3)[:, None, None]
        )

    check(partial(gated_delta_rule, normalize=True), of_units, cast(inputs, device, dtype))


def of_units(q: Tensor, k: Tensor, **others: Tensor) -> Tensor:
    wide = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in (q, k)]
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in wide)
    return delta_cases.eager(q, k, **others).to(others["v"].dtype)


def test_parts_of_a_projection_are_not_copied_to_be_kept(quick_device, kept):
    """The backward pass keeps the arguments alone."""
    inputs = cast(delta_cases.inputs(CHUNK, dims=(16, 16)), quick_device, torch.float16)
    both = torch.cat([inputs[name].flatten(2) for name in "qkv"], -1).requires_grad_()
    g, beta = (inputs[name].requires_grad_() for name in ("g", "beta"))
    q, k, v = (each.unflatten(-1, (-1, 16)) for each in both.split([32, 32, 64], -1))
    gated_delta_rule(q, k, v, g, beta, normalize=True)
    memory = {t.untyped_storage().data_ptr() for t in kept}
    assert memory == {t.untyped_storage().data_ptr() for t in (both, g, beta)}


def is_right(dim):
    probe = delta_rule.is_right.__wrapped__
    return probe(torch.device("cpu"), torch.float16, dim, 2, sizes=(1, 64, 135))


@pytest.mark.parametrize("dim", [16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.interpreter
def test_triton_is_found_right(dim):
    assert is_right(dim)


@pytest.mark.parametrize("wrong", ["nothing", "_on_triton", "_backward_on_triton", "nan"])
def test_triton_that_is_wrong_is_found_out(wrong, monkeypatch, recwarn):
    """PyTorch's operations stand for Triton's kernels."""
    monkeypatch.setattr(delta_rule, "_on_triton", delta_rule._with_pytorch)
    monkeypatch.setattr(delta_rule, "_backward_on_triton", delta_rule._backward_with_pytorch)
    if wrong == "nan":
        monkeypatch.setattr(delta_rule, "_on_triton", lambda q, k, v, *_: v * torch.nan)
    elif wrong != "nothing":
        own = getattr(delta_rule, wrong)

        def compute(*arguments):
            found = own(*arguments)
            (found if wrong == "_on_triton" else found[1])[0, 30] = 0.0
            return found

        monkeypatch.setattr(delta_rule, wrong, compute)
    pytest.importorskip("triton")
    found = is_right(16)
    assert found == (wrong == "nothing")
    messages = [str(each.message) for each in recwarn.list]
    assert [m.startswith("liger_patch: Triton") for m in messages] == [True] * (not found)


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_heads_of_a_real_model(dtype, normalize):
    """Of Qwen3.5-4B, but for their number. Triton's kernels serve them."""
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.autocast("cuda", torch.bfloat16):
        assert delta_rule.is_right(device, dtype, 128, 2, normalize)
    inputs = delta_cases.inputs(1000, batch=1, heads=2, groups=2, dims=(128, 128))
    eager = of_units if normalize else delta_cases.eager
    rule = partial(gated_delta_rule, normalize=normalize)
    check(rule, eager, cast(inputs, torch.device("cuda"), dtype))
