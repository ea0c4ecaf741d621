"""A gated feed-forward layer with LoRA adapters as two functions: results and every gradient
against float64, no worse than PEFT's arithmetic, and what it keeps for the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import assert_no_worse
from kernel_forms import INTERPRETED
from layer_checks import ACTIVATIONS
from lora_checks import (
    ADAPTERS,
    EVERYTHING,
    WAYS,
    check,
    eager_linear,
    eager_mlp,
    our_mlp,
    projection,
    results,
    trainable,
)
from slow_cases import slow_but
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from liger_patch.kernels.lora import mlp
from liger_patch.kernels.lora.mlp import lora_mlp
from liger_patch.kernels.lora.projection import LoraProjection

HIDDEN, SIZE = 40, 56
SHAPES = {
    "batch": (5, 7, HIDDEN),
    "row": (HIDDEN,),
    "three": (2, 3, 5, HIDDEN),
    "none": (0, HIDDEN),
    "none of a batch": (2, 0, HIDDEN),
}
RANKS = {
    "equal": (16, 16, 16),
    "unequal": (8, 20, 16),
    "of 1": (1, 1, 1),
    "of 64": (64, 1, 33),
    "of 70": (8, 16, 70),  # more than a tile of the Triton form holds
}


def made(
    device: Any,
    way: str = "float64",
    shape: Any = "batch",
    ranks: str = "unequal",
    size: int = SIZE,
    **how: Any,
) -> tuple[Tensor, list[LoraProjection]]:
    """x, and gate, up and down."""
    dtype, adapters, _ = WAYS[way]
    x = (torch.randn(SHAPES.get(shape, shape)) / 2).to(device, dtype)
    hidden_size = x.shape[-1]
    sizes = (size, hidden_size), (size, hidden_size), (hidden_size, size)
    options = {"dtype": dtype, "adapters": adapters, "device": device, **how}
    each = zip(sizes, RANKS[ranks], strict=True)
    return x, [projection(*features, rank, **options) for features, rank in each]


@pytest.mark.parametrize("wanted", [ADAPTERS, EVERYTHING], ids=["frozen base", "trainable base"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("way", WAYS)
def test_lora_mlp(way: str, activation: str, wanted: str, device: torch.device) -> None:
    x, parts = made(device, way)
    how = {"wanted": wanted, "autocast": WAYS[way][2]}
    check(our_mlp(activation), eager_mlp(activation), x, parts, **how)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("way", ["float32", "float16"])
def test_any_rank(way: str, ranks: str, device: torch.device) -> None:
    shape = 20, 30, HIDDEN  # of fewer numbers, the largest error of a gradient of rank 1 is luck
    x, parts = made(device, way, shape, ranks=ranks)
    check(our_mlp("silu"), eager_mlp("silu"), x, parts, wanted=EVERYTHING)


@pytest.mark.parametrize("way", ["float64", "float16", "autocast"])
def test_biases(way: str, device: torch.device) -> None:
    x, parts = made(device, way, bias=True)
    how = {"wanted": EVERYTHING, "autocast": WAYS[way][2]}
    check(our_mlp("gelu_tanh"), eager_mlp("gelu_tanh"), x, parts, **how)


@pytest.mark.parametrize("scaling", [1.0, -0.25, 0.0, 16.0])
@pytest.mark.parametrize("way", ["float64", "float16"])
def test_scaling(way: str, scaling: float, device: torch.device) -> None:
    """Each projection has its own."""
    x, parts = made(device, way)
    parts = [part._replace(scaling=scaling / (i + 1)) for i, part in enumerate(parts)]
    check(our_mlp("silu"), eager_mlp("silu"), x, parts, wanted=EVERYTHING)


FEWEST = "float16", "row"


@pytest.mark.parametrize(
    ("way", "shape"),
    # not one row of float16: of so few numbers eager's are now and then exact
    [(way, each) for way in ("float64", "float16") for each in SHAPES if (way, each) != FEWEST],
)
def test_any_number_of_batch_dimensions(way: str, shape: str, device: torch.device) -> None:
    x, parts = made(device, way, shape)
    check(our_mlp("silu"), eager_mlp("silu"), x, parts, wanted=EVERYTHING)


@pytest.mark.parametrize("way", ["float64", "float32", "float16"])
def test_to_another_size(way: str, device: torch.device) -> None:
    x, (gate, up, down) = made(device, way, (16, 6, HIDDEN))  # of few numbers, errors are luck
    parts = [gate, up, down._replace(weight=down.weight[:9], b=down.b[:9])]
    check(our_mlp("silu"), eager_mlp("silu"), x, parts, wanted=EVERYTHING)


@pytest.mark.parametrize("way", ["float32", "float16"])
@pytest.mark.parametrize("view", ["transposed", "expanded", "sliced"])
def test_any_strides(view: str, way: str, device: torch.device) -> None:
    """Of x, of the adapters, and of what comes back."""
    of: Callable[[Tensor], Tensor] = {
        "transposed": lambda x: x[..., :HIDDEN].transpose(0, 1),
        "expanded": lambda x: x[:, :1, :HIDDEN].expand(4, 6, HIDDEN),
        "sliced": lambda x: x[..., ::2],
    }[view]
    x, _ = made(device, way, (4, 6, 2 * HIDDEN))
    _, parts = made(device, way)
    parts = [p._replace(a=p.a.t().contiguous().t(), b=p.b.t().contiguous().t()) for p in parts]

    def of_view(layer: Any) -> Any:
        return lambda x, parts: tuple(y.transpose(0, 1) for y in layer(of(x), parts))

    ways = of_view(our_mlp("silu")), of_view(eager_mlp("silu"))
    check(*ways, x, parts, wanted=EVERYTHING)


WANTED = {
    "nothing of x": r"\d\.[ab]",
    "x alone": "x",
    "A of gate": r"0\.a",
    "B of up": r"1\.b",
    "A of down": r"2\.a",
    "B of down": r"2\.b",
    "the adapter of down": r"2\.[ab]",
    "the adapter of gate": r"x|0\.[ab]",
    "the weight of gate": r"0\.weight",
    "the weight of down": r"2\.weight",
    "the bias of up": r"1\.bias",
    "the bias of down": r"2\.bias",
    "the base alone": r"\d\.(weight|bias)",
}


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("way", ["float64", "float16"])
def test_only_the_gradients_that_are_wanted(way: str, wanted: str, device: torch.device) -> None:
    x, parts = made(device, way, bias=True)
    check(our_mlp("silu"), eager_mlp("silu"), x, parts, wanted=wanted)


@pytest.mark.parametrize("way", ["float32", "bfloat16", "float16", "autocast"])
def test_quantised_bases(way: str, device: torch.device) -> None:
    x, parts = made(device, way, quantised=True)
    how = {"wanted": EVERYTHING, "autocast": WAYS[way][2]}
    check(our_mlp("silu"), eager_mlp("silu"), x, parts, **how)


def test_what_is_kept(device: torch.device) -> None:
    """x, gate and up of the base, thin products, and A of gate and up as one matrix."""
    leaves, parts = trainable(*made(device, "float16"))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = lora_mlp(leaves["x"], *parts)
    given = {each.data_ptr() for each in leaves.values()}
    others = sorted(tuple(t.shape) for t in saved if t.data_ptr() not in given)
    assert others == [(8 + 20, 40), (35, 8 + 20), (35, SIZE), (35, SIZE)]
    y.sum().backward()
    assert all(each.grad is not None for each in leaves.values() if each.requires_grad)


def test_gate_and_up_are_freed_before_the_products_of_dx(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under checkpoints: else the graph holds them."""
    held: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    of_activation, of_input = mlp.activate_backward, mlp.input_gradient

    def activate_backward(da: Tensor, ds: Tensor, gate: Tensor, up: Tensor, *others: Any) -> Any:
        held.extend(map(weakref.ref, (gate, up)))
        return of_activation(da, ds, gate, up, *others)

    def input_gradient(*arguments: Any) -> Tensor:
        alive.extend(each() is not None for each in held)
        return of_input(*arguments)

    monkeypatch.setattr(mlp, "activate_backward", activate_backward)
    monkeypatch.setattr(mlp, "input_gradient", input_gradient)
    leaves, parts = trainable(*made(device, "float16"), EVERYTHING)
    y = checkpoint(lambda x: lora_mlp(x, *parts), leaves["x"], use_reentrant=False)
    y.sum().backward()
    assert alive == [False, False]  # of down, nothing is held yet


def test_two_backward_passes_are_the_same(device: torch.device) -> None:
    """The first writes over none of what is kept, nor over the upstream gradient."""
    leaves, parts = trainable(*made(device, "float16"), EVERYTHING)
    y = lora_mlp(leaves["x"], *parts)
    dy = torch.randn_like(y)
    before = dy.clone()
    runs = [
        torch.autograd.grad(y, list(leaves.values()), dy, retain_graph=keep)
        for keep in (True, False)
    ]
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
    assert torch.equal(dy, before)


def test_a_backward_pass_under_autocast_computes_in_the_dtype_of_the_forward_pass(
    device: torch.device,
) -> None:
    leaves, parts = trainable(*made(device, "float32"))
    asked = [each for each in leaves.values() if each.requires_grad]
    y = lora_mlp(leaves["x"], *parts).sum()
    expected = torch.autograd.grad(y, asked, retain_graph=True)
    with torch.autocast(device.type, torch.bfloat16):
        gradients = torch.autograd.grad(y, asked)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))


SQUARE = 24  # features of x, of gate and of y, so that one adapter can copy any of them


@pytest.mark.parametrize("activation", ACTIVATIONS)
# float64: in float32, sums in place round more often (torch 2.6 on a CPU: 4 to 17 % too much)
@pytest.mark.parametrize("way", ["float64", "float16", "autocast"])
@pytest.mark.parametrize("slice_tokens", [None, 400])
def test_dropout_has_one_mask_forward_and_backward(
    slice_tokens: int | None, way: str, activation: str, device: torch.device
) -> None:
    """The masks are read from adapters that only copy; after the same seed, they are drawn so."""
    dtype, adapters, autocast = WAYS[way]
    rates = 0.25, 0.5, 0.75
    options = {"dtype": dtype, "adapters": adapters, "device": device}
    x = (torch.randn(50, 30, SQUARE) / 2).to(device, dtype)
    parts = [projection(SQUARE, SQUARE, SQUARE, dropout=rate, **options) for rate in rates]
    one, zero = (make(SQUARE, SQUARE, device=device) for make in (torch.eye, torch.zeros))
    ones = torch.ones(SQUARE, device=device, dtype=dtype)
    copied = [LoraProjection(zero.to(dtype), None, *[one.to(adapters)] * 2, 1.0, p) for p in rates]
    constant = [  # 1, whatever x is
        LoraProjection(zero.to(dtype), ones, *[zero.to(adapters)] * 2, 1.0, p) for p in rates
    ]
    through = constant[2]._replace(weight=one.to(dtype), bias=None)

    def seeded(x: Tensor, parts: Any) -> tuple[Tensor]:
        torch.manual_seed(7)
        return (lora_mlp(x, *parts, activation=activation, slice_tokens=slice_tokens),)

    masks = []
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        for given in (
            (copied[0], constant[1], through),
            (constant[0], copied[1], through),
            (constant[0], constant[1], copied[2]),
        ):
            masks.append(seeded(torch.ones_like(x), given)[0] != 0)
    for mask, rate in zip(masks, rates, strict=True):
        deviations = (mask.double().mean().item() - (1 - rate)) / (
            rate * (1 - rate) / mask.numel()
        ) ** 0.5
        assert abs(deviations) < 5

    def product(x: Tensor, i: int, parts: Any) -> Tensor:
        part = parts[i]
        y = linear(x, part.weight, part.bias)
        seen = x.to(part.a.dtype) * masks[i] * (1.0 / (1.0 - part.dropout))
        return (y + linear(linear(seen, part.a), part.b) * part.scaling).to(y.dtype)

    def dropped(x: Tensor, parts: Any) -> tuple[Tensor]:
        a = ACTIVATIONS[activation](product(x, 0, parts)) * product(x, 1, parts)
        return (product(a, 2, parts),)

    check(seeded, dropped, x, parts, wanted=EVERYTHING, autocast=autocast)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("way", ["float64", "float16"])
def test_dropout_of_one_projection(way: str, which: int, device: torch.device) -> None:
    """Another seed gives other numbers, the same seed the same."""
    x, parts = made(device, way)
    parts[which] = parts[which]._replace(dropout=0.5)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(results(our_mlp("silu"), x, parts, wanted=EVERYTHING))
    for name, value in runs[0].items():
        again, other = (run[name] for run in runs[1:])
        assert value is not None
        assert again is not None
        assert other is not None
        assert torch.equal(value, again), name
        assert value.isfinite().all(), name
    assert not torch.equal(runs[0]["y 0"], runs[2]["y 0"])  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["float64", "float16"])
def test_dropout_of_any_strides(way: str, device: torch.device) -> None:
    """Of x and of the adapters: the same features are dropped."""
    x, parts = made(device, way, (70, 2 * HIDDEN), dropout=0.5)
    _, parts = made(device, way, dropout=0.5)
    others = [p._replace(a=p.a.t().contiguous().t(), b=p.b.t().contiguous().t()) for p in parts]
    runs = []
    for each, given in ((x[:, ::2].contiguous(), parts), (x[:, ::2], others)):
        torch.manual_seed(7)
        runs.append(results(our_mlp("silu"), each, given))
    assert_no_worse(runs[1], runs[0], runs[0], torch.float32 if way == "float64" else x.dtype)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing_leaves_out_the_last_product(
    dropout: float, reentrant: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing behind the last saved tensor is computed again, but by reentrant checkpoints."""
    x, parts = made(device, "float16", dropout=dropout)
    products: list[Any] = []
    read = LoraProjection.dense

    def counted(self: LoraProjection, dtype: torch.dtype) -> Tensor:
        products.append(self)
        return read(self, dtype)

    monkeypatch.setattr(LoraProjection, "dense", counted)

    def way(checkpoints: bool) -> Any:
        def call(x: Tensor, parts: Any) -> tuple[Tensor]:
            torch.manual_seed(7)
            if checkpoints:
                return (checkpoint(lora_mlp, x, *parts, use_reentrant=reentrant),)
            return (lora_mlp(x, *parts),)

        return call

    expected = results(way(False), x, parts, wanted="x")
    assert len(products) == 3 + 3  # forward, and dx of each
    products.clear()
    ours = results(way(True), x, parts, wanted="x")
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert len(products) == 3 + (3 if reentrant else 2) + 3


def test_a_checkpoint_of_adapters_alone(device: torch.device) -> None:
    """As in a model's first layer, whose x takes no gradient."""
    leaves, parts = trainable(*made(device, "float16"), r"\d\.[ab]")
    adapters = [each for each in leaves.values() if each.requires_grad]
    expected = torch.autograd.grad(lora_mlp(leaves["x"], *parts).sum(), adapters)
    y = checkpoint(lora_mlp, leaves["x"], *parts, use_reentrant=False)
    ours = torch.autograd.grad(y.sum(), adapters)
    assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))


@pytest.mark.parametrize("wanted", ["x", r"0\.b", r"2\.a", r"2\.b", EVERYTHING])
def test_a_second_derivative_is_refused(wanted: str, device: torch.device) -> None:
    leaves, parts = trainable(*made(device, "float32"), wanted)
    y = lora_mlp(leaves["x"], *parts).sum()
    asked = [each for each in leaves.values() if each.requires_grad]
    with pytest.raises(RuntimeError, match="lora_mlp has no second derivative"):
        torch.autograd.grad(y, asked, create_graph=True)


def test_no_gradients_are_recorded_without_grad(device: torch.device) -> None:
    leaves, parts = trainable(*made(device, "float16"), EVERYTHING)
    with torch.no_grad():
        y = lora_mlp(leaves["x"], *parts)
    assert not y.requires_grad
    assert torch.equal(y, lora_mlp(leaves["x"], *parts))


@pytest.mark.parametrize("name", ["0.weight", "1.b", "2.weight", "2.a", "2.b"])
def test_a_change_in_place_before_the_backward_pass_is_an_error(
    name: str, device: torch.device
) -> None:
    leaves, parts = trainable(*made(device, "float32"))
    y = lora_mlp(leaves["x"], *parts).sum()
    with torch.no_grad():
        leaves[name].mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace|was changed in place between"):
        y.backward()


def test_a_device_without_autocast_and_memory() -> None:
    x, parts = made("meta", "bfloat16")
    y = lora_mlp(x, *parts)
    assert (y.shape, y.dtype, y.device.type) == (SHAPES["batch"], torch.bfloat16, "meta")


X = torch.zeros(2, 8)
PART = LoraProjection(torch.zeros(6, 8), torch.zeros(6), torch.zeros(4, 8), torch.zeros(6, 4), 1.0)
DOWN = LoraProjection(torch.zeros(8, 6), None, torch.zeros(3, 6), torch.zeros(8, 3), 1.0)
SMALL = PART._replace(weight=torch.zeros(5, 8), bias=None, b=torch.zeros(5, 4))
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "activation": (
        lambda: lora_mlp(X, PART, PART, DOWN, activation="relu"),
        r"activation must be one of .* got 'relu'",
    ),
    "integers": (
        lambda: lora_mlp(X.long(), PART, PART, DOWN),
        "x must be floating point .* got torch.int64",
    ),
    "x": (
        lambda: lora_mlp(X[:, :7], PART, PART, DOWN),
        r"^gate\.weight must have shape \(O, 7\), got \(6, 8\)",
    ),
    "up": (lambda: lora_mlp(X, PART, SMALL, DOWN), r"up.weight must have 6 rows .* got 5"),
    "down": (
        lambda: lora_mlp(X, SMALL, SMALL, DOWN),
        r"^down\.weight must have shape \(O, 5\), got \(8, 6\)",
    ),
    "A of down": (
        lambda: lora_mlp(X, PART, PART, DOWN._replace(a=torch.zeros(3, 5))),
        r"^down\.a must have shape \(3, 6\), got \(3, 5\)",
    ),
    "dtype of down": (
        lambda: lora_mlp(X, PART, PART, DOWN._replace(b=DOWN.b.double())),
        r"^down\.b must be torch.float32 as x is, outside autocast, got torch.float64",
    ),
    "dropout": (
        lambda: lora_mlp(X, PART, PART, DOWN._replace(dropout=1.5)),
        r"^down\.dropout must be in \[0, 1\), got 1.5",
    ),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_an_error_that_names_it(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The launches of the Triton kernels."""
    pytest.importorskip("triton")
    from liger_patch.kernels.triton import gated_lora

    found: list[str] = []
    for name in ("gated_lora", "gated_lora_backward_"):
        launcher = getattr(gated_lora, name)

        def launched(*arguments: Any, launcher: Any = launcher, name: str = name) -> Any:
            found.append(name)
            return launcher(*arguments)

        monkeypatch.setattr(gated_lora, name, launched)
    return found


BOTH = ["gated_lora", "gated_lora_backward_"]


@pytest.mark.interpreter
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("size", slow_but([200], [128, 200, 9]))
@pytest.mark.parametrize("tokens", slow_but([150, 5], [64, 150, 5]))
def test_kernels_of_several_programs(
    tokens: int,
    size: int,
    ranks: str,
    activation: str,
    launches: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In both directions, in tiles that are full and that are not."""
    from liger_patch.kernels.triton import gated_lora

    monkeypatch.setattr(gated_lora, "PROGRAM_COLUMNS", 128)
    monkeypatch.setattr(gated_lora, "PROGRAM_ROWS", 128)
    x, parts = made("cpu", "float16", (tokens, HIDDEN), ranks, size)
    check(our_mlp(activation), eager_mlp(activation), x, parts, wanted=EVERYTHING)
    assert launches == ([] if ranks == "of 70" else BOTH)


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_large_gates_are_finite(launches: list[str]) -> None:
    """Whose exponentials are infinite in float16."""
    x, parts = made("cpu", "float16", (70, HIDDEN))
    parts[0] = parts[0]._replace(weight=parts[0].weight * 60)
    for activation in ACTIVATIONS:
        check(our_mlp(activation), eager_mlp(activation), x, parts)
    assert launches == BOTH * len(ACTIVATIONS)


REAL = {"aligned": (2048, 1024, 2816), "of nothing": (1111, 1000, 2731), "few": (3, 512, 1536)}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
@pytest.mark.parametrize("ranks", ["equal", "unequal", "of 64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("way", ["bfloat16", "float16", "autocast"])
def test_real_shapes(
    way: str, activation: str, ranks: str, shape: Any, launches: list[str]
) -> None:
    """Tiles come through the tensor memory accelerator where the size is a multiple of 8."""
    tokens, hidden_size, size = shape
    x, parts = made("cuda", way, (tokens, hidden_size), ranks, size)
    how = {"wanted": EVERYTHING, "autocast": WAYS[way][2]}
    check(our_mlp(activation), eager_mlp(activation), x, parts, **how)
    assert launches == BOTH


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
@pytest.mark.parametrize("way", ["bfloat16", "float16"])
def test_the_same_inputs_give_the_same_bits(way: str, shape: Any) -> None:
    tokens, hidden_size, size = shape
    x, parts = made("cuda", way, (tokens, hidden_size), size=size)
    runs = [results(our_mlp("silu"), x, parts, wanted=EVERYTHING) for _ in range(2)]
    torch.testing.assert_close(*runs, rtol=0, atol=0)


@pytest.mark.gpu
def test_tiles_and_pointers_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_patch.kernels.triton import gated_lora

    x, parts = made("cuda", "bfloat16", REAL["aligned"][:2], size=REAL["aligned"][2])
    if not gated_lora.takes_descriptors(x.device):
        pytest.skip("needs a tensor memory accelerator")
    tiled = check(our_mlp("silu"), eager_mlp("silu"), x, parts, wanted=EVERYTHING)
    monkeypatch.setattr(gated_lora, "takes_descriptors", lambda device: False)
    ours = check(our_mlp("silu"), eager_mlp("silu"), x, parts, wanted=EVERYTHING)
    torch.testing.assert_close(ours["y 0"], tiled["y 0"], rtol=0, atol=0)


@pytest.mark.gpu
def test_bytes_kept_per_token() -> None:
    """x, gate and up, the thin products, and y itself, in bf16."""
    tokens, hidden_size, size = 4096, 1024, 4096
    x, parts = made("cuda", "bfloat16", (tokens, hidden_size), "equal", size)
    leaves, parts = trainable(x, parts)
    del x
    lora_mlp(leaves["x"], *parts).sum().backward()  # whatever is allocated once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = lora_mlp(leaves["x"], *parts)
    kept = torch.cuda.memory_allocated() - before
    thin = 2 * 3 * 16
    # x is there in any case; the allocator rounds each tensor up to 2 MiB at most
    assert kept <= tokens * (4 * size + thin + 2 * hidden_size) + 3 * 2**21
    assert y.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_computed_again_in_the_threads_of_autograd(reentrant: bool) -> None:
    x, parts = made("cuda", "autocast", (300, 512), size=1024)

    def checkpointed(x: Tensor, parts: Any) -> tuple[Tensor]:
        return (checkpoint(lora_mlp, x, *parts, use_reentrant=reentrant),)

    how = {"autocast": True, "wanted": "x" if reentrant else ADAPTERS}
    runs = [results(layer, x, parts, **how) for layer in (checkpointed, our_mlp("silu"))]
    torch.testing.assert_close(*runs, rtol=0, atol=0)


def test_one_projection_is_what_eager_computes() -> None:
    """The reference itself: base, and what the adapter adds."""
    x, (part, *_) = made("cpu")
    added = part.scaling * part.b @ part.a
    torch.testing.assert_close(eager_linear(x, part), linear(x, part.weight + added))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter serves float16")
def test_the_cpu_launches_no_kernel(launches: list[str]) -> None:
    results(our_mlp("silu"), *made("cpu", "float16"))
    assert not launches
