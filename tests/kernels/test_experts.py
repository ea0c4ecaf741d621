"""Experts of a mixture: results and every gradient against float64, no worse than a loop over the
experts whose weights hold the adapters.
"""

from itertools import cycle, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from exactness import assert_same_bits
from expert_cases import FORMS, calls, check, inputs
from kernel_forms import INTERPRETED
from layer_checks import results_and_gradients
from slow_cases import slow_but

from liger_patch.kernels import expert_steps
from liger_patch.kernels.experts import Activation

ADAPTERS = {"both": (4, 3), "first": (16, 0), "last": (0, 24), "none": (0, 0)}
TOKENS = 50  # of fewer numbers, the largest error is luck
FORWARD = ["order_slots", "gather", "gated", "add_thin_", "sum_slots"]
LAUNCHERS = {
    "expert_rows": ["order_slots", "gather", "sum_slots"],
    "experts": ["gated", "gated_backward_", "add_thin_"],
}
BACKWARD = ["gather", "gated_backward_", "gather", "add_thin_", "sum_slots"]


def cast(tensors: dict[str, Any], dtype: torch.dtype, device: Any = "cpu") -> dict[str, Any]:
    return {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        for name, value in tensors.items()
    }


@pytest.fixture
def launches(record) -> list[str]:
    """The launches of the Triton kernels."""
    found: list[str] = []
    for module, names in LAUNCHERS.items():
        kernels = pytest.importorskip(f"liger_patch.kernels.triton.{module}")
        for name in names:
            record(kernels, name, lambda *_, name=name: found.append(name))
    return found


@pytest.mark.parametrize(
    ("form", "adapters", "bias"),
    slow_but(
        list(zip(FORMS, cycle(ADAPTERS), cycle([True, False, False]))),
        list(product(FORMS, ADAPTERS, [False, True])),
    ),
)
def test_every_form_and_adapter(form, adapters, bias, device):
    tensors = inputs(TOKENS, ranks=ADAPTERS[adapters], bias=bias)
    for dtype in (torch.float16, torch.float64):
        check(cast(tensors, dtype, device), FORMS[form])


@pytest.mark.parametrize(("first", "last"), slow_but([(1, 24)], [(1, 24), (24, 4), (16, 32)]))
def test_any_rank(first, last, device):
    tensors = inputs(TOKENS, ranks=(first, last))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        eps = 2 if dtype == torch.float32 else 1  # eager's sums of a GPU may be exact by luck
        found = check(cast(tensors, dtype, device), eps=eps)
        assert not found["first.weight"][3].any()  # of an expert without rows


@pytest.mark.parametrize("slots", slow_but([1, 5], [1, 2, 5, 8]))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_any_number_of_experts_a_token(dtype, slots, device):
    check(cast(inputs(TOKENS, slots, count=9, bias=True), dtype, device), FORMS["clamped"])


COUNTS = {  # of rows: one expert has all, a tile is full, one row more, many tiles
    "all to one": [90, 0, 0],
    "full tiles": [64, 128, 64],
    "one more": [65, 1, 0],
    "one less": [63, 0, 127],
    "the last alone": [0, 0, 70],
    "one token": [0, 1, 0],
}


@pytest.mark.parametrize(
    ("counts", "is_transposed"),
    slow_but(
        list(zip(COUNTS.values(), cycle([False, True]))),
        list(product(COUNTS.values(), [False, True])),
    ),
)
def test_any_share_of_the_rows(counts, is_transposed, device):
    tokens = sum(counts)
    tensors = inputs(tokens, 1, count=3, is_transposed=is_transposed)
    order = torch.randperm(tokens)
    tensors["index"] = torch.arange(3).repeat_interleave(torch.tensor(counts))[order][:, None]
    for dtype in (torch.float16, torch.float64):
        if tokens > 1 or dtype == torch.float64:  # of one row in 16 bits, eager's error is luck
            check(cast(tensors, dtype, device))


@pytest.mark.parametrize(
    ("form", "tokens"),
    slow_but(
        [("clamped, interleaved, shifted", 49)],
        [("silu", 17), ("clamped, interleaved, shifted", 49)],
    ),
)
def test_slices(form, tokens, device):
    """Gradients of parameters are sums over the slices."""
    tensors = inputs(TOKENS, bias=True)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        check(cast(tensors, dtype, device), FORMS[form], slice_tokens=tokens)


def test_slices_keep_x_and_its_routing_alone(quick_device, kept):
    tensors = cast(inputs(TOKENS, bias=True), torch.float16, quick_device)
    leaves = {n: v if n == "index" else v.requires_grad_() for n, v in tensors.items()}
    y = calls(slice_tokens=7)[0](**leaves)
    assert {each.data_ptr() for each in kept} == {each.data_ptr() for each in leaves.values()}
    y.sum().backward()
    assert all(v.grad is not None for n, v in leaves.items() if n != "index")


@pytest.mark.interpreter
@pytest.mark.parametrize(("tokens", "slots", "count"), [(1, 1, 1), (1500, 3, 5), (9, 8, 512)])
def test_the_order_is_a_stable_sort(tokens, slots, count, device):
    index = torch.randint(count, (tokens, slots))
    order = expert_steps.order_of(index.to(device), count)
    offsets, ordered, places = (each.cpu().long() for each in order[1:4])
    assert torch.equal(ordered, index.view(-1).argsort(stable=True))
    assert torch.equal(places.view(-1)[ordered], torch.arange(index.numel()))
    assert torch.equal(offsets, index.view(-1).bincount(minlength=count).cumsum(0))


@pytest.mark.parametrize("expert", [0, 4])
def test_an_expert_twice_for_one_token(expert, device):
    tensors = inputs(TOKENS, 3)
    tensors["index"] = torch.full_like(tensors["index"], expert)
    check(cast(tensors, torch.float64, device))


@pytest.mark.parametrize("limit", [0.3, 0.9])
def test_many_features_are_clamped(limit, device):
    """In float64, where none is a rounding away from the limit."""
    for shift, is_interleaved in ((0.0, False), (1.0, True)):
        form = Activation("clamped", 1.702, limit, shift, is_interleaved)
        check(cast(inputs(TOKENS, bias=True), torch.float64, device), form)


@pytest.mark.parametrize("weights", [torch.float32, torch.float64])
def test_routing_weights_of_a_wider_dtype(weights, device):
    """As most routers compute them; their gradient has it too."""
    tensors = cast(inputs(TOKENS, bias=True), torch.float16, device)
    check(tensors | {"weights": tensors["weights"].to(weights)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
def test_autocast(dtype, bias, quick_device):
    """Adapters and biases stay in float32, and so do their gradients."""
    tensors = cast(inputs(TOKENS, bias=bias), torch.float32, quick_device)
    for name in ("x", "first.weight", "last.weight"):
        tensors[name] = tensors[name].to(dtype)
    check(tensors, autocast=True, dtype=torch.bfloat16)


@pytest.mark.interpreter
@pytest.mark.parametrize(("tokens", "slots"), slow_but([(150, 2)], [(150, 2), (64, 1), (9, 3)]))
@pytest.mark.parametrize("size", slow_but([72], [64, 72, 130]))
@pytest.mark.parametrize("form", ["gelu", "clamped, interleaved, shifted"])
def test_kernels_of_several_programs(form, size, tokens, slots, launches):
    """In tiles of rows and features that are full and that are not."""
    tensors = inputs(tokens, slots, hidden=136, size=size, ranks=(24, 3), bias=True)
    check(cast(tensors, torch.float16), FORMS[form])
    assert launches == FORWARD + BACKWARD


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_large_gates_are_finite():
    """Whose exponentials are infinite in float16."""
    tensors = inputs(70)
    tensors["first.weight"][..., :40] *= 60
    for form in ("silu", "gelu", "gelu_tanh"):
        check(cast(tensors, torch.float16), FORMS[form])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter would take minutes")
def test_bytes_of_a_token_of_qwen3_30b(kept):
    """Kept for the backward pass with adapters of rank 16, as docs/lora.md has them."""
    hidden, size, slots, rank, tokens = 2048, 768, 8, 16, 16
    tensors = cast(inputs(tokens, 2, 2, hidden, size, ranks=(rank, rank)), torch.bfloat16)
    tensors["index"] = tensors["index"].repeat(1, slots // 2)  # few experts serve as well
    tensors["weights"] = tensors["weights"].repeat(1, slots // 2)
    trained = {n: v.requires_grad_(n == "x" or n[-2:] in (".a", ".b")) for n, v in tensors.items()}
    given = {v.untyped_storage().data_ptr() for n, v in trained.items() if n.startswith(("f", "l"))}
    y = calls()[0](**trained)
    sizes = {s.data_ptr(): s.nbytes() for s in (each.untyped_storage() for each in kept)}
    adapters = 2 * sum(v.numel() for n, v in trained.items() if n[-2:] in (".a", ".b"))
    found = sum(size for place, size in sizes.items() if place not in given) - adapters
    found = (found - 4 * 2) / tokens  # without where the slots of both experts end
    orders = 2 * slots * 4 + 2 * slots  # slots and places in int32, and weights
    assert y.requires_grad
    assert found == 2 * hidden + slots * (4 * size + 2 * 2 * rank) + orders
    docs = (Path(__file__).parents[2] / "docs" / "lora.md").read_text(encoding="utf-8")
    assert f"keeps {found / 1000:.1f} kB" in docs


REAL = {  # H, I, E, K, tokens
    "Qwen3-30B-A3B": (2048, 768, 128, 8, 1000),
    "gpt-oss": (2880, 2880, 32, 4, 300),
    "few tokens": (2048, 768, 128, 8, 3),
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_real_shapes(dtype, shape, launches):
    """In bf16 with PyTorch's grouped products, which give zero for an expert without rows."""
    hidden, size, count, slots, tokens = shape
    is_clamped = shape is REAL["gpt-oss"]
    # of so many numbers an adapter would bring some near the limit
    ranks = (0, 8) if is_clamped else (16, 8)
    how = {"ranks": ranks, "bias": is_clamped, "is_transposed": not is_clamped}
    tensors = cast(inputs(tokens, slots, count, hidden, size, **how), dtype, "cuda")
    check(tensors, FORMS["clamped, interleaved, shifted" if is_clamped else "silu"])
    assert set(launches) == {*FORWARD, *BACKWARD}
    ours, _ = calls()
    once, again = (results_and_gradients(ours, tensors, {"index"}) for _ in range(2))
    assert_same_bits(once, again)
    for name, value in once.items():
        if name.startswith(("first", "last")):
            assert not value[-2].any(), name


@pytest.mark.gpu
def test_grouped_products_run_without_a_loop(monkeypatch):
    """On Hopper and later, so the host reads no counts."""
    if torch.cuda.get_device_capability() < (9, 0) or expert_steps.GROUPED_MM is None:
        pytest.skip("needs a GPU with grouped products")
    reads = Mock(side_effect=AssertionError("the host reads the counts"))
    monkeypatch.setattr(expert_steps, "_groups", reads)
    tensors = cast(inputs(TOKENS, bias=True), torch.bfloat16, "cuda")
    results_and_gradients(calls()[0], tensors, {"index"})
