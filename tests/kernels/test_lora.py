"""Linear layers with LoRA adapters as one function: results and every gradient against float64, no
worse than PEFT's arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from lora_checks import (
    ADAPTERS,
    EVERYTHING,
    WAYS,
    check,
    eager_linears,
    projection,
    results,
    trainable,
)
from lora_inputs import HIDDEN, SHAPES
from torch import Tensor
from torch.nn.functional import linear

from liger_patch.kernels.lora.linears import lora_linears
from liger_patch.kernels.lora.projection import LoraProjection

# (O, R, whether it has a bias) of each projection
PROJECTIONS = {
    "one": ((56, 16, False),),
    "one with a bias": ((33, 8, True),),
    "of unequal ranks": ((56, 8, True), (24, 16, False), (24, 20, True)),
    "of rank 1": ((56, 1, False), (24, 1, True)),
    "of large ranks": ((56, 64, False), (24, 70, False)),
}


def made(device: Any, way: str = "float64", shape: Any = "batch", which: str = "", **how: Any):
    """x and projections."""
    dtype, adapters, _ = WAYS[way]
    x = (torch.randn(SHAPES.get(shape, shape)) / 2).to(device, dtype)
    sizes = PROJECTIONS[which or "of unequal ranks"]
    options = {"dtype": dtype, "adapters": adapters, "device": device, **how}
    parts = [projection(o, HIDDEN, rank, bias=bias, **options) for o, rank, bias in sizes]
    return x, parts


@pytest.mark.parametrize("wanted", [ADAPTERS, EVERYTHING], ids=["frozen base", "trainable base"])
@pytest.mark.parametrize("which", PROJECTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_lora_linears(way: str, which: str, wanted: str, device: torch.device) -> None:
    x, parts = made(device, way, which=which)
    check(lora_linears, eager_linears, x, parts, wanted=wanted, autocast=WAYS[way][2])


@pytest.mark.parametrize("shape", SHAPES)
def test_any_number_of_batch_dimensions(shape: str, device: torch.device) -> None:
    x, parts = made(device, shape=shape)
    check(lora_linears, eager_linears, x, parts, wanted=EVERYTHING)


@pytest.mark.parametrize("scaling", [1.0, -0.25, 0.0, 16.0])
def test_scaling(scaling: float, device: torch.device) -> None:
    x, parts = made(device, "float32", scaling=scaling)
    check(lora_linears, eager_linears, x, parts, wanted=EVERYTHING)


@pytest.mark.parametrize("view", ["transposed", "expanded", "sliced"])
def test_any_strides(view: str, device: torch.device) -> None:
    """Of x, of the adapters, and of what comes back."""
    of: Callable[[Tensor], Tensor] = {
        "transposed": lambda x: x[..., :HIDDEN].transpose(0, 1),
        "expanded": lambda x: x[:, :1, :HIDDEN].expand(4, 6, HIDDEN),
        "sliced": lambda x: x[..., ::2],
    }[view]
    x, parts = made(device, "float32", (4, 6, 2 * HIDDEN), "one")
    parts = [p._replace(a=p.a.t().contiguous().t(), b=p.b.t().contiguous().t()) for p in parts]

    def way(layer: Any) -> Any:
        def call(x: Tensor, parts: Any) -> tuple[Tensor]:
            (y,) = layer(of(x), parts)
            return (y.transpose(0, 1),)

        return call

    check(way(lora_linears), way(eager_linears), x, parts, wanted=EVERYTHING)


WANTED = {
    "nothing of x": r"\d\.[ab]",
    "x alone": "x",
    "one A": r"1\.a",
    "one B": r"1\.b",
    "one weight": r"1\.weight",
    "one bias": r"0\.bias",
    "the adapter of one": r"x|0\.[ab]",
    "the base alone": r"\d\.(weight|bias)",
}


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
def test_only_the_gradients_that_are_wanted(wanted: str, device: torch.device) -> None:
    x, parts = made(device)
    check(lora_linears, eager_linears, x, parts, wanted=wanted)


@pytest.mark.parametrize("unused", [(0,), (1,), (0, 2)], ids=str)
@pytest.mark.parametrize("way", ["float64", "autocast"])
def test_an_output_that_is_not_used(unused: Any, way: str, device: torch.device) -> None:
    """Of which autograd gives no upstream gradient. Its own parameters may get zeros instead."""
    x, parts = made(device, way)
    used = "".join(str(i) for i in range(3) if i not in unused)
    wanted = rf"x|[{used}]\..*"
    how = {"wanted": wanted, "unused": unused, "autocast": WAYS[way][2]}
    check(lora_linears, eager_linears, x, parts, **how)
    ours = results(lora_linears, x, parts, **{**how, "wanted": EVERYTHING})
    for i in unused:
        rest = [ours[f"{i}.{name}"] for name in ("weight", "a", "b")]
        assert not any(each is not None and each.any() for each in rest)


@pytest.mark.parametrize("which", PROJECTIONS)
@pytest.mark.parametrize("way", ["float32", "bfloat16", "float16", "autocast"])
def test_quantized_bases(way: str, which: str, device: torch.device) -> None:
    x, parts = made(device, way, which=which, quantized=True)
    check(lora_linears, eager_linears, x, parts, wanted=EVERYTHING, autocast=WAYS[way][2])


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("way", ["bfloat16", "autocast"])
def test_bases_of_bitsandbytes(kind: str, way: str, device: torch.device) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from liger_patch.integrations import bitsandbytes

    hidden_size = 64
    x, (part,) = made(device, way, (5, 7, hidden_size), "one")
    (part,) = (projection(48, hidden_size, 8, dtype=WAYS[way][0], adapters=WAYS[way][1]),)
    if kind == "nf4":
        layer = bnb.nn.Linear4bit(hidden_size, 48, bias=False, compute_dtype=torch.bfloat16)
        layer.weight = bnb.nn.Params4bit(part.weight, requires_grad=False, quant_type="nf4")
    else:
        layer = bnb.nn.Linear8bitLt(hidden_size, 48, bias=False, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(part.weight, requires_grad=False, has_fp16_weights=False)
    weight = bitsandbytes.quantized_weight(layer.to(device), torch.bfloat16)
    assert weight is not None
    part = part._replace(weight=weight, a=part.a.to(device), b=part.b.to(device))
    check(lora_linears, eager_linears, x, [part], wanted=EVERYTHING, autocast=WAYS[way][2])


def test_a_quantized_base_is_not_kept_dense(device: torch.device) -> None:
    x, parts = made(device, "float32", quantized=True)
    leaves, parts = trainable(x, parts)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ys = lora_linears(leaves["x"], parts)
    given = {each.data_ptr() for each in leaves.values()}
    ranks = 8 + 16 + 20
    others = [tuple(t.shape) for t in saved if t.data_ptr() not in given]
    assert others == [(35, ranks), (ranks, 40)]  # s, and A of all projections
    sum(y.sum() for y in ys).backward()
    assert all(leaves[f"{i}.a"].grad is not None for i in range(3))


def test_adapters_are_cast_in_one_call(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    copy = torch._foreach_copy_

    def counted(targets: list[Tensor], sources: list[Tensor]) -> None:
        calls.append(len(sources))
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    leaves, parts = trainable(*made(device, "autocast"))
    with torch.autocast(device.type, torch.bfloat16):
        ys = lora_linears(leaves["x"], parts)
    sum(y.sum() for y in ys).backward()
    assert calls == [6]  # A and B of three, and none in the backward pass


@pytest.mark.parametrize("adapters", [torch.float16, torch.float32], ids=str)
def test_the_scaling_keeps_gradients_finite(adapters: torch.dtype, device: torch.device) -> None:
    """PEFT scales dy, not dB: in float16, a sum that is scaled last overflows."""
    options: Any = {"dtype": torch.float16, "adapters": adapters, "device": device}
    part = projection(24, 40, 8, **options)._replace(scaling=0.125)
    leaves, (part,) = trainable(torch.ones(4096, 40, dtype=torch.float16, device=device), [part])
    with torch.no_grad():
        part.a.fill_(0.25)
    with torch.autocast(device.type, torch.float16):
        (y,) = lora_linears(leaves["x"], [part])
    (db,) = torch.autograd.grad(y, part.b, torch.full_like(y, 10.0))
    torch.testing.assert_close(db, torch.full_like(db, 4096 * 10 * 10 * 0.125), rtol=1e-3, atol=0)


def test_two_backward_passes_are_the_same(device: torch.device) -> None:
    """The first writes over none of what is kept, nor over the upstream gradients."""
    leaves, parts = trainable(*made(device, "float32"), EVERYTHING)
    ys = lora_linears(leaves["x"], parts)
    upstream = [torch.randn_like(y) for y in ys]
    before = [each.clone() for each in upstream]
    runs = [
        torch.autograd.grad(ys, list(leaves.values()), upstream, retain_graph=keep)
        for keep in (True, False)
    ]
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
    assert all(torch.equal(*pair) for pair in zip(upstream, before, strict=True))


def test_a_backward_pass_under_autocast_computes_in_the_dtype_of_the_forward_pass(
    device: torch.device,
) -> None:
    leaves, parts = trainable(*made(device, "float32"))
    asked = [each for each in leaves.values() if each.requires_grad]
    total = sum(y.sum() for y in lora_linears(leaves["x"], parts))
    expected = torch.autograd.grad(total, asked, retain_graph=True)
    with torch.autocast(device.type, torch.bfloat16):
        gradients = torch.autograd.grad(total, asked)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("way", ["float32", "bfloat16", "float16", "autocast"])
def test_dropout_has_one_mask_forward_and_backward(way: str, device: torch.device) -> None:
    """Each projection its own. The masks are read from adapters that only copy x: after the same
    seed, they are drawn alike.
    """
    dtype, adapters, autocast = WAYS[way]
    rates = 0.25, 0.5, 0.75
    x, parts = made(device, way, (40, 30, HIDDEN))
    parts = [part._replace(dropout=rate) for part, rate in zip(parts, rates, strict=True)]
    copy = torch.eye(HIDDEN, device=device)
    copies = [
        LoraProjection(torch.zeros_like(copy, dtype=dtype), None, *[copy.to(adapters)] * 2, 1.0, p)
        for p in rates
    ]

    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        masks = [y != 0 for y in seeded(torch.ones_like(x), copies)]
    for mask, rate in zip(masks, rates, strict=True):
        deviations = (mask.double().mean().item() - (1 - rate)) / (
            rate * (1 - rate) / mask.numel()
        ) ** 0.5
        assert abs(deviations) < 5
    both = (masks[0] & masks[1]).double().mean().item()
    assert abs(both - 0.75 * 0.5) < 5 * (0.25 / masks[0].numel()) ** 0.5  # independent

    def dropped(x: Tensor, parts: Any) -> tuple[Tensor, ...]:
        ys = []
        for part, mask in zip(parts, masks, strict=True):
            y = linear(x, part.weight, part.bias)
            seen = x.to(part.a.dtype) * mask * (1.0 / (1.0 - part.dropout))
            ys.append((y + linear(linear(seen, part.a), part.b) * part.scaling).to(y.dtype))
        return tuple(ys)

    check(seeded, dropped, x, parts, wanted=EVERYTHING, autocast=autocast)


def test_dropout_of_some_projections(device: torch.device) -> None:
    """Those without draw no mask: theirs are the numbers of no dropout at all."""
    x, parts = made(device)
    expected = results(lora_linears, x, parts)
    parts[1] = parts[1]._replace(dropout=0.5)
    ours = results(lora_linears, x, parts)
    names = [name for name in expected if name in ("y 0", "y 2") or name[0] in "02"]
    chosen, same = ({name: run[name] for name in names} for run in (ours, expected))
    assert_no_worse(chosen, same, same, torch.float32)
    assert not torch.allclose(ours["y 1"], expected["y 1"])


def seeded(x: Tensor, parts: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(7)
    return lora_linears(x, parts)


@pytest.mark.parametrize("way", ["float64", "float16"])
def test_dropout_of_any_strides(way: str, device: torch.device) -> None:
    """Of x and of A: the same features are dropped."""
    x, parts = made(device, way, (70, 2 * HIDDEN), dropout=0.5)
    others = [part._replace(a=part.a.t().contiguous().t()) for part in parts]
    expected = results(seeded, x[:, ::2].contiguous(), parts)
    ours = results(seeded, x[:, ::2], others)
    assert_no_worse(ours, expected, expected, torch.float32 if way == "float64" else x.dtype)


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("way", ["float32", "float16"])
def test_the_gradients_that_are_wanted_with_dropout(
    way: str, wanted: str, device: torch.device
) -> None:
    """Are those that there are where all are wanted."""
    x, parts = made(device, way, dropout=0.5)
    expected = results(seeded, x, parts, wanted=EVERYTHING)
    ours = results(seeded, x, parts, wanted=wanted)
    for name, value in ours.items():
        is_wanted = name[0] == "y" or re.fullmatch(wanted, name) is not None
        assert (value is not None) == is_wanted, name
        if value is not None:
            assert_no_worse({"": value}, {"": expected[name]}, {"": expected[name]}, x.dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("rank", [1, 16, 20, 64])
@pytest.mark.parametrize("tokens", [64, 150, 5])
def test_dropout_kernels_of_several_programs(
    tokens: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both directions, in tiles that are full and that are not: linear in x, so the gradient of
    x is the mask's own.
    """
    dropout = pytest.importorskip("liger_patch.kernels.triton.dropout")
    monkeypatch.setattr(dropout, "PROGRAM_ROWS", 64)
    hidden_size, rate = 70, 0.25
    x = torch.randn(tokens, hidden_size).half()
    base = torch.zeros(hidden_size, hidden_size).half()
    copied = torch.eye(hidden_size).half()
    # 70 features are copied by two adapters, as no tile holds a rank of 70
    parts = [projection(33, hidden_size, rank, dtype=torch.float16, dropout=rate)]
    halves = [
        LoraProjection(base, None, copied[half], copied[:, half], 1.0, rate)
        for half in (slice(0, 35), slice(35, 70))
    ]
    masks = []
    for half in halves:  # each the first to draw after the seed
        (y,) = seeded(torch.ones_like(x), [half])
        masks.append(y)
    mask = sum(masks) != 0

    def dropped(x: Tensor, parts: Any) -> tuple[Tensor, ...]:
        (part,) = parts
        seen = x * mask * (1.0 / (1.0 - rate))
        return (linear(x, part.weight) + linear(linear(seen, part.a), part.b) * part.scaling,)

    check(seeded, dropped, x, parts, wanted=EVERYTHING)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing_gives_the_same_numbers(
    dropout: float, reentrant: bool, device: torch.device
) -> None:
    from torch.utils.checkpoint import checkpoint

    x, parts = made(device, "float16", dropout=dropout)

    def checkpointed(x: Tensor, parts: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(7)
        return checkpoint(lora_linears, x, parts, use_reentrant=reentrant)

    ours, expected = (results(layer, x, parts, wanted="x") for layer in (checkpointed, seeded))
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("wanted", ["x", r"\d\.a", EVERYTHING])
def test_a_second_derivative_is_refused(wanted: str, device: torch.device) -> None:
    leaves, parts = trainable(*made(device, "float32"), wanted)
    total = sum(y.sum() for y in lora_linears(leaves["x"], parts))
    asked = [each for each in leaves.values() if each.requires_grad]
    with pytest.raises(RuntimeError, match="lora_linears has no second derivative"):
        torch.autograd.grad(total, asked, create_graph=True)


def test_no_gradients_are_recorded_without_grad(device: torch.device) -> None:
    leaves, parts = trainable(*made(device, "float32"), EVERYTHING)
    with torch.no_grad():
        assert not any(y.requires_grad for y in lora_linears(leaves["x"], parts))


@pytest.mark.parametrize("which", ["one", "of unequal ranks"])
def test_results_can_be_changed_in_place(which: str, device: torch.device) -> None:
    """OLMo clamps queries, keys and values in place."""
    x, parts = made(device, "float32", which=which)

    def clamped(layer: Any) -> Any:
        return lambda x, parts: tuple(y.clamp_(-0.1, 0.2) for y in layer(x, parts))

    def clamped_copies(x: Tensor, parts: Any) -> tuple[Tensor, ...]:
        return tuple(y.clamp(-0.1, 0.2) for y in eager_linears(x, parts))

    check(clamped(lora_linears), clamped_copies, x, parts, wanted=EVERYTHING)


def test_a_change_in_place_before_the_backward_pass_is_an_error(device: torch.device) -> None:
    leaves, parts = trainable(*made(device, "float32"))
    total = sum(y.sum() for y in lora_linears(leaves["x"], parts))
    with torch.no_grad():
        leaves["1.b"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_a_cast_adapter_may_change_before_the_backward_pass(device: torch.device) -> None:
    """As under autocast, gradients are those of the values that the forward pass had."""
    leaves, parts = trainable(*made(device, "autocast"))
    with torch.autocast(device.type, torch.bfloat16):
        total = sum(y.sum() for y in lora_linears(leaves["x"], parts))
    asked = [each for each in leaves.values() if each.requires_grad]
    expected = torch.autograd.grad(total, asked, retain_graph=True)
    with torch.no_grad():
        for i in range(len(parts)):
            leaves[f"{i}.a"].mul_(2)
            leaves[f"{i}.b"].mul_(2)
    found = torch.autograd.grad(total, asked)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_device_without_autocast_and_memory() -> None:
    x, parts = made("meta", "bfloat16", which="one")
    (y,) = lora_linears(x, parts)
    assert (y.shape, y.dtype, y.device.type) == ((5, 7, 56), torch.bfloat16, "meta")


X = torch.zeros(2, 8)
PART = LoraProjection(torch.zeros(6, 8), torch.zeros(6), torch.zeros(4, 8), torch.zeros(6, 4), 1.0)


def called(x: Tensor = X, **fields: Any) -> Callable[[], object]:
    return lambda: lora_linears(x, (PART, PART._replace(**fields)))


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "integers": (
        called(X.long()),
        r"x must be floating point \(..., H\), got torch.int64 \(2, 8\)",
    ),
    "number": (called(X[0, 0]), r"x must be floating point \(..., H\), got torch.float32 \(\)"),
    "x": (called(X[:, :7]), r"projections\[0\].weight must have shape \(O, 7\), got \(6, 8\)"),
    "weight": (
        called(weight=torch.zeros(6, 9)),
        r"projections\[1\].weight must have shape \(O, 8\), got \(6, 9\)",
    ),
    "bias": (called(bias=torch.zeros(5)), r"\[1\].bias must have shape \(6,\), got \(5,\)"),
    "a": (called(a=torch.zeros(4, 7)), r"\[1\].a must have shape \(4, 8\), got \(4, 7\)"),
    "b": (called(b=torch.zeros(6, 3)), r"\[1\].b must have shape \(6, 4\), got \(6, 3\)"),
    "device": (called(b=PART.b.to("meta")), r"\[1\].b must be on cpu as x is, got meta"),
    "dtype": (
        called(a=PART.a.half()),
        r"\[1\].a must be torch.float32 as x is, outside autocast, got torch.float16",
    ),
    "dropout": (called(dropout=1.0), r"\[1\].dropout must be in \[0, 1\), got 1.0"),
    "negative dropout": (called(dropout=-0.1), r"\[1\].dropout must be in \[0, 1\), got -0.1"),
    "nan": (called(dropout=float("nan")), r"\[1\].dropout must be in \[0, 1\), got nan"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_an_error_that_names_it(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call()
