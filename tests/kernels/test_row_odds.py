"""Odds from logits, in one walk: losses and gradients of what GPUs other than Hopper's run."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from exactness import assert_no_worse, error
from kernel_forms import FORMS, INTERPRETED
from slow_cases import slow_but
from three_ways import (
    OPTIONS,
    check_linear,
    chunk_mib,
    eager_cross_entropy,
    filled,
    linear_inputs,
    loss_and_gradients,
)
from torch.nn.functional import linear

pytest.importorskip("triton")

from liger_patch.kernels.head import row_odds
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.linear_log_probs import linear_log_probs
from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.triton import row_odds as kernels

SERVED = {name: how for name, how in OPTIONS.items() if "label_smoothing" not in how}
SERVED["everything"] = {k: v for k, v in OPTIONS["everything"].items() if k != "label_smoothing"}
pytestmark = pytest.mark.filterwarnings(  # of the interpreter's numpy
    "ignore:(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning"
)
operator = partial(linear_cross_entropy, hopper_kernels=False)


@pytest.fixture(params=FORMS[1:])
def odds(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[torch.device, torch.dtype]]:
    """Device and dtype that such odds are computed in, in rows of several blocks; a test in which
    none are fails. The interpreter multiplies no bf16.
    """
    is_interpreter = request.param == "cpu"
    if is_interpreter and not INTERPRETED:
        pytest.skip("needs Triton's interpreter")
    if is_interpreter:
        monkeypatch.setattr(row_odds, "serves_row_odds", lambda *_: True)
        for block in (kernels.BLOCK, kernels.BLOCK_WITH_SOFTCAP):
            monkeypatch.setitem(block, "BLOCK_V", 32)
    computed = []
    turn = row_odds.RowOddsForm._turn

    def counted(self: Any, *args: Any) -> None:
        computed.append(self)
        turn(self, *args)

    monkeypatch.setattr(row_odds.RowOddsForm, "_turn", counted)
    yield torch.device(request.param), torch.float32 if is_interpreter else torch.bfloat16
    assert computed


@pytest.mark.parametrize("options", SERVED.values(), ids=SERVED)
def test_every_option(options, odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device)
    options = filled(options, len(labels), 131, device)
    check_linear(inputs, labels, operator=operator, chunk_mib=chunk_mib(5, 131, dtype), **options)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("frozen", [(), ("hidden_states",), ("weight",)], ids=str)
@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_every_reduction_with_any_upstream_gradient(reduction, frozen, ignored, odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, ignored=ignored)
    upstream = torch.tensor(-1.7, device=device)
    if reduction == "none":
        upstream = torch.arange(len(labels), device=device) - 3.0
    how: dict[str, Any] = {"upstream": upstream, "frozen": frozen, "reduction": reduction}
    check_linear(inputs, labels, operator=operator, **how)


@pytest.mark.parametrize("frozen", [(), ("weight",), ("hidden_states", "weight")], ids=str)
def test_an_adapter(frozen, odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 60, rank=20)
    options = filled(SERVED["everything"], len(labels), 131, device)
    check_linear(inputs, labels, operator=operator, frozen=frozen, **options)


@pytest.mark.parametrize(
    "shape",
    [
        (20, 33, 128),  # whole blocks of the interpreter
        (3, 64, 257),  # a class alone in its block
        (1, 7, 2),
        (2, 40, 20001),  # several blocks of a GPU
    ],
    ids=str,
)
def test_any_shape(shape, odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, *shape, ignored=0.1)
    labels[0] = shape[-1] - 1
    check_linear(inputs, labels, operator=operator)


@pytest.mark.parametrize("ignored", slow_but([0.4], [0.0, 0.4, 0.95]))
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_any_number_of_chunks_twice_the_same_bits(rows, ignored, odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 20, ignored=ignored)
    how: dict[str, Any] = {"operator": operator, "chunk_mib": chunk_mib(rows, 131, dtype)}
    first, second = (check_linear(inputs, labels, **how) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("scale", slow_but([100.0], [10.0, 100.0]))
@pytest.mark.parametrize("options", [{}, {"softcap": 200.0}, {"z_loss": 1e-3}], ids=str)
def test_losses_beyond_what_odds_hold(scale, options, odds):
    """exp(z - z of the label) would overflow: rows go on against a larger logit."""
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 20, ignored=0.1)
    inputs["hidden_states"] *= scale
    check_linear(inputs, labels, operator=operator, chunk_mib=chunk_mib(7, 131, dtype), **options)
    losses = operator(**inputs, labels=labels, reduction="none", **options)
    assert losses.max() > 60


def test_a_larger_logit_in_every_block(odds):
    """What has been written of a row is scaled again and again, as far as to 0."""
    device, dtype = odds
    vocab_size = 4 * kernels.BLOCK["BLOCK_V"] + 5
    inputs, labels = linear_inputs(dtype, device, 6, 8, vocab_size, ignored=0.0)
    steps = torch.arange(vocab_size, device=device) * (220 / vocab_size)
    inputs["weight"] = torch.zeros_like(inputs["weight"])
    inputs["weight"][:, 0] = steps.to(dtype)
    inputs["hidden_states"][:, 0] = torch.tensor([1.0, 0.5, 0.25, -1.0, 0.125, -0.5], device=device)
    labels[:] = torch.tensor([0, 1, vocab_size // 2, vocab_size - 1, 3, 9], device=device)
    ours = loss_and_gradients(lambda **x: operator(**x, labels=labels), inputs)
    truth = loss_and_gradients(
        lambda **x: eager_cross_entropy(linear(*x.values()), labels),
        {name: value.double() for name, value in inputs.items()},
    )
    # float32 rounds the logits times log2(e), here up to 317
    for name, exact in truth.items():
        assert (
            error(ours[name], exact)
            <= (1e-5 if dtype == torch.float32 else 0.01) * exact.abs().max()
        )


def test_probability_of_one(odds):
    """log(1 + others) keeps others that are below the last digit of 1."""
    device, dtype = odds
    weight = torch.eye(64, device=device, dtype=dtype)
    inputs = {"hidden_states": 25 * weight[:5], "weight": weight}
    ours = check_linear(inputs, torch.arange(5, device=device), operator=operator)
    expected = torch.tensor(math.log1p(63 * math.exp(-25)), device=device)
    torch.testing.assert_close(ours["loss"], expected, rtol=1e-5, atol=0, check_dtype=False)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_reach_the_loss_of_their_token(value, odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 6, ignored=0.0)
    inputs["hidden_states"][2, 3] = value
    leaves = [each.requires_grad_() for each in inputs.values()]
    losses = operator(leaves[0], leaves[1], labels, reduction="none")
    losses.sum().backward()
    eager = eager_cross_entropy(linear(*inputs.values()), labels, reduction="none")
    assert torch.equal(losses.isfinite(), eager.isfinite())


def test_impossible_label_costs_infinity(odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 6, ignored=0.0)
    inputs["hidden_states"] = inputs["hidden_states"].abs()
    inputs["weight"][labels[2]] = -math.inf
    leaves = [each.requires_grad_() for each in inputs.values()]
    losses = operator(leaves[0], leaves[1], labels, reduction="none")
    losses.sum().backward()
    assert losses.isposinf().equal(labels == labels[2])


def test_loss_with_gradients_is_that_without(odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 20, ignored=0.2)
    alone = operator(**inputs, labels=labels, reduction="none")
    of_training = loss_and_gradients(
        lambda **x: operator(**x, labels=labels, reduction="none"),
        inputs,
        torch.ones(20, device=device),
    )["loss"]
    torch.testing.assert_close(of_training, alone, rtol=1e-6, atol=1e-6)


def test_statistics_beside_the_gradients(odds, monkeypatch):
    device, dtype = odds
    monkeypatch.setattr("liger_patch.kernels.head.odds_inputs.serves_odds", lambda *_: False)
    inputs, labels = linear_inputs(dtype, device, 20, ignored=0.0)
    names = ("entropy", "lse", "is_top1", "mean_logits")

    def ours(**x):
        return -linear_log_probs(**x, labels=labels, outputs=names).log_probs.sum()

    def eager(**x):
        return eager_cross_entropy(linear(*x.values()), labels, reduction="sum")

    truth = loss_and_gradients(eager, {name: value.double() for name, value in inputs.items()})
    results = loss_and_gradients(ours, inputs)
    assert_no_worse(results, loss_and_gradients(eager, inputs), truth, dtype)
    found = linear_log_probs(**inputs, labels=labels, outputs=names)
    logits = linear(*inputs.values()).double()
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert found.entropy is not None
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"dtype": torch.float16}, False),
        ({"dtype": torch.float32}, False),
        ({"bias": True}, False),
        ({"label_smoothing": 0.1}, False),
        ({"writes_float32": False}, False),
    ],
    ids=str,
)
def test_what_is_served(change, served, monkeypatch):
    how = {"dtype": torch.bfloat16, "bias": False, "label_smoothing": 0.0, "writes_float32": True}
    how |= change
    monkeypatch.setattr(row_odds, "writes_float32", lambda _: how["writes_float32"])
    weight = torch.zeros(131, 8, dtype=how["dtype"])
    operands = HeadInputs(weight[:5], weight, weight[:, 0] if how["bias"] else None)
    options = LossOptions(label_smoothing=how["label_smoothing"])
    assert row_odds.serves_row_odds(operands, options) is served
