"""The product that writes odds: bf16 on Hopper; float32 under Triton's interpreter, which
multiplies no bf16.
"""

import math
from functools import partial

import pytest
import torch
from exactness import assert_no_worse
from kernel_forms import INTERPRETED
from log_probs_ways import check_log_probs
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

from liger_patch.kernels.descriptors import TensorDescriptor, is_hopper
from liger_patch.kernels.head import hopper, odds_inputs
from liger_patch.kernels.head import logits as head_logits
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.linear_log_probs import linear_log_probs
from liger_patch.kernels.options import LossOptions

SERVED = {
    **{name: how for name, how in OPTIONS.items() if "label_smoothing" not in how},
    "everything": {
        "softcap": 5.0,
        "logit_scale": 0.5,
        "z_loss": 1e-2,
        "class_weight": True,
        "token_weight": True,
    },
}
STATISTICS = ("entropy", "lse", "is_top1")
IS_HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))

pytestmark = [
    pytest.mark.skipif(TensorDescriptor is None, reason="Triton < 3.4"),
    # what overflows is computed again; the interpreter's numpy says so
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning"
    ),
]


@pytest.fixture(
    params=[
        pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter),
        pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
    ]
)
def odds(request, monkeypatch):
    """Device and dtype that odds are computed in; a test in which none are fails."""
    if INTERPRETED and request.param == "cpu":
        monkeypatch.setattr(odds_inputs, "serves_odds", lambda *_: True)
    elif not IS_HOPPER:
        pytest.skip("needs a Hopper GPU")
    computed = []
    run = hopper.OddsForm.run

    def counted(self, *args, **how):
        computed.append(self)
        run(self, *args, **how)

    monkeypatch.setattr(hopper.OddsForm, "run", counted)
    dtype = torch.float32 if request.param == "cpu" else torch.bfloat16
    yield torch.device(request.param), dtype
    assert computed


def refuse_odds(monkeypatch):
    """From here on, a test in which odds are computed fails."""

    def refused(*_, **__):
        raise AssertionError("odds are computed")

    monkeypatch.setattr(hopper.OddsForm, "run", refused)


@pytest.fixture
def bf16_odds(odds, monkeypatch):
    """The device, for inputs in the dtype that is served, whose values the interpreter has in
    float32: an entropy seen from a label far below the largest logit loses digits that bf16 never
    had.
    """
    device, _ = odds

    def in_float32(hidden_states, weight, *, low_rank=None, chunk_mib=None, **how):
        return linear_log_probs(
            hidden_states.float(),
            weight.float(),
            low_rank=low_rank and tuple(each.float() for each in low_rank),
            chunk_mib=chunk_mib and 2 * chunk_mib,  # as many rows
            **how,
        )

    if device.type == "cpu":
        monkeypatch.setattr("log_probs_ways.linear_log_probs", in_float32)
    return device


@pytest.mark.parametrize("options", SERVED.values(), ids=SERVED)
def test_every_option(options, odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device)
    options = filled(options, len(labels), 131, device)
    check_linear(inputs, labels, chunk_mib=chunk_mib(5, 131, dtype), **options)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("frozen", [(), ("hidden_states",), ("weight",)], ids=str)
@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_every_reduction_with_any_upstream_gradient(reduction, frozen, ignored, odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, ignored=ignored)
    upstream = torch.tensor(-1.7, device=device)
    if reduction == "none":
        upstream = torch.arange(len(labels), device=device) - 3.0
    check_linear(inputs, labels, upstream=upstream, frozen=frozen, reduction=reduction)


@pytest.mark.parametrize("rank", slow_but([24], [8, 16, 24, 64]))
@pytest.mark.parametrize("frozen", [(), ("weight",), ("hidden_states", "weight")], ids=str)
def test_an_adapter_of_any_rank(rank, frozen, odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 150, rank=rank)
    options = filled(SERVED["everything"], len(labels), 131, device)
    check_linear(inputs, labels, frozen=frozen, **options)
    check_linear(inputs, labels, frozen=frozen, chunk_mib=chunk_mib(40, 131, dtype))


@pytest.mark.parametrize(
    "shape",
    [
        (300, 72, 131),  # three tiles of rows, the last with 44
        (130, 8, 128),  # exactly one tile of classes
        (3, 64, 257),  # a class alone in its tile
        (1, 8, 2),
        (2, 200, 9001),
    ],
    ids=str,
)
def test_any_shape(shape, odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, *shape, ignored=0.1)
    labels[0] = shape[-1] - 1
    check_linear(inputs, labels)


@pytest.mark.parametrize("scale", slow_but([100.0], [10.0, 100.0]))
@pytest.mark.parametrize("options", [{}, {"softcap": 200.0}, {"z_loss": 1e-3}], ids=str)
def test_losses_beyond_60_nats(scale, options, odds):
    """exp(z - z of the label) overflows: then each row is taken against its largest logit."""
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 20, ignored=0.1)
    inputs["hidden_states"] *= scale
    ours = check_linear(inputs, labels, chunk_mib=chunk_mib(7, 131, dtype), **options)
    assert ours["loss"] > 20
    losses = linear_cross_entropy(**inputs, labels=labels, reduction="none", **options)
    assert losses.max() > 60


def test_no_chunk_has_overflowed_before_it_runs(odds, monkeypatch):
    """The flag lies in memory that may have been used before: 1 would compute a chunk twice."""
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 40, ignored=0.2)
    new_empty, run, flags = torch.Tensor.new_empty, hopper.OddsForm.run, []
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **how: new_empty(*a, **how).fill_(1))

    def watched(self, *args, **how):
        flags.append(self._overflow.item())
        run(self, *args, **how)

    monkeypatch.setattr(hopper.OddsForm, "run", watched)
    linear_cross_entropy(**inputs, labels=labels, chunk_mib=chunk_mib(7, 131, dtype))
    assert len(flags) > 1
    assert not any(flags)


def test_one_row_beyond_60_nats_leaves_the_others_alone(odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 9, ignored=0.0)
    one = dict(inputs, hidden_states=inputs["hidden_states"].clone())
    one["hidden_states"][4] *= -100
    calm, wild = (
        loss_and_gradients(
            lambda x=x, **_: linear_cross_entropy(
                x["hidden_states"], x["weight"], labels, reduction="none"
            ),
            {},
        )["loss"]
        for x in (inputs, one)
    )
    assert wild[4] > 60
    others = torch.arange(9, device=device) != 4
    assert torch.equal(calm[others], wild[others])


def test_probability_of_one(odds):
    """log(1 + others) keeps others that are below the last digit of 1."""
    device, dtype = odds
    weight = torch.eye(64, device=device, dtype=dtype)
    hidden_states = 25 * weight[:5]
    labels = torch.arange(5, device=device)
    losses = linear_cross_entropy(hidden_states, weight, labels, reduction="none")
    expected = math.log1p(63 * math.exp(-25))
    torch.testing.assert_close(losses, torch.full_like(losses, expected), rtol=1e-5, atol=0)
    check_linear({"hidden_states": hidden_states, "weight": weight}, labels)
    others = 63 * math.exp(-25)
    entropy = linear_log_probs(hidden_states, weight, labels, outputs=("entropy",)).entropy
    expected = math.log1p(others) + 25 * others / (1 + others)
    torch.testing.assert_close(entropy, torch.full_like(entropy, expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_reach_the_loss_of_their_token(value, odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 6, ignored=0.0)
    inputs["hidden_states"][2, 3] = value
    losses = linear_cross_entropy(**inputs, labels=labels, reduction="none")
    eager = eager_cross_entropy(linear(*inputs.values()), labels, reduction="none")
    assert torch.equal(losses.isfinite(), eager.isfinite())


def test_impossible_label_costs_infinity(odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 6, ignored=0.0)
    inputs["hidden_states"] = inputs["hidden_states"].abs()
    inputs["weight"][labels[2]] = -math.inf
    losses = linear_cross_entropy(**inputs, labels=labels, reduction="none")
    assert losses.isposinf().equal(labels == labels[2])


def test_all_labels_ignored_gives_zero(odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 6, ignored=0.0)
    check_linear(inputs, labels)  # odds are computed here
    ours = loss_and_gradients(
        lambda **x: linear_cross_entropy(**x, labels=labels.fill_(-100)), inputs
    )
    assert all(not value.any() for value in ours.values())


def test_twice_the_same_bits(odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 150)
    first, second = (check_linear(inputs, labels) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_kernels_of_other_gpus_can_be_asked_for(odds, monkeypatch):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 40, ignored=0.2)
    check_linear(inputs, labels)

    refuse_odds(monkeypatch)
    operator = partial(linear_cross_entropy, hopper_kernels=False)
    check_linear(inputs, labels, operator=operator)
    # the gradients are computed again in the backward pass, by the same kernels
    upstream = torch.rand(40, device=device)
    check_linear(inputs, labels, operator=operator, reduction="none", upstream=upstream)


def test_small_batches_run_the_kernels_of_other_gpus(odds, monkeypatch):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 40, ignored=0.2)
    check_linear(inputs, labels)

    refuse_odds(monkeypatch)
    monkeypatch.setattr(odds_inputs, "SMALL_BATCH", 40)
    check_linear(inputs, labels)
    for tokens, hopper_kernels in ((40, True), (39, None)):
        monkeypatch.setattr(odds_inputs, "SMALL_BATCH", tokens)
        operator = partial(linear_cross_entropy, hopper_kernels=hopper_kernels)
        with pytest.raises(AssertionError, match="odds are computed"):
            check_linear(inputs, labels, operator=operator)


def test_losses_alone_are_those_with_gradients_and_take_no_logits(odds, monkeypatch):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 40, ignored=0.2)
    given = []
    run = hopper.OddsForm.run

    def watched(self, *args, memory, **how):
        given.append(memory)
        run(self, *args, memory=memory, **how)

    monkeypatch.setattr(hopper.OddsForm, "run", watched)
    with_gradients = loss_and_gradients(
        lambda **x: linear_cross_entropy(**x, labels=labels, chunk_mib=chunk_mib(7, 131, dtype)),
        inputs,
    )["loss"]
    assert given
    assert all(memory is not None for memory in given)
    given.clear()
    alone = linear_cross_entropy(**inputs, labels=labels, chunk_mib=chunk_mib(7, 131, dtype))
    assert given
    assert all(memory is None for memory in given)
    assert torch.equal(alone, with_gradients)


def test_backward_twice_gives_the_same_bits(odds):
    """Also with ignored tokens: the second backward pass knows their number, the first did not."""
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 40, ignored=0.4)
    leaves = [value.requires_grad_() for value in inputs.values()]
    loss = linear_cross_entropy(*leaves, labels, chunk_mib=chunk_mib(7, 131, dtype))
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("ignored", slow_but([0.4], [0.0, 0.4, 0.95]))
@pytest.mark.parametrize("rows", [1, 2, 3, 39, 40])
def test_any_number_of_chunks(rows, ignored, odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 40, ignored=ignored)
    check_linear(inputs, labels, chunk_mib=chunk_mib(rows, 131, dtype))


@pytest.mark.parametrize("columns", slow_but([16], [8, 16, 24]))
def test_rows_in_groups_of_any_size(columns, odds, monkeypatch):
    device, dtype = odds
    monkeypatch.setattr(hopper, "GROUPED_COLUMNS", columns)
    hopper.tile_constants.cache_clear()
    inputs, labels = linear_inputs(dtype, device, 500, 8, ignored=0.0)
    check_linear(inputs, labels)
    hopper.tile_constants.cache_clear()


@pytest.mark.parametrize("class_weight", [False, True])
@pytest.mark.parametrize("label", [131, -1, 10**12, -300])
def test_label_outside_the_vocabulary_is_named(label, class_weight, odds):
    """The first chunk runs before the host knows: nothing outside may be read or written."""
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 6, ignored=0.0)
    leaves = [value.requires_grad_() for value in inputs.values()]
    labels[4] = label
    weights = torch.ones(131, device=device) if class_weight else None
    with pytest.raises(ValueError, match=rf"got {label} \(1 outside\)"):
        linear_cross_entropy(*leaves, labels, class_weight=weights)


def test_many_tokens_with_the_same_label(odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 60, ignored=0.2)
    labels[labels % 3 == 0] = 5
    labels[10:40] = 7
    first, second = (check_linear(inputs, labels) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_inputs_in_padded_rows_and_strided_class_weights(odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device)
    padded = {
        name: torch.nn.functional.pad(value, (0, 24))[:, :-24] for name, value in inputs.items()
    }
    assert padded["weight"].stride() == (64, 1)
    class_weight = torch.rand(262, device=device)[::2]
    check_linear(padded, labels, class_weight=class_weight)
    check_linear(inputs, labels, class_weight=class_weight)


@pytest.mark.parametrize(
    ("rank", "options"),
    [
        (0, {}),
        (0, {"softcap": 5.0}),
        (0, {"logit_scale": 0.5, "temperature": 1.6}),
        (0, {"softcap": 5.0, "temperature": 0.7}),
        (8, {}),
        (24, {"softcap": 5.0}),
    ],
    ids=str,
)
def test_statistics(rank, options, bf16_odds):
    inputs, labels = linear_inputs(torch.bfloat16, bf16_odds, rank=rank)
    budget = chunk_mib(5, 131, torch.bfloat16)
    check_log_probs(inputs, labels, outputs=STATISTICS, chunk_mib=budget, **options)


@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_lse_of_any_loss(scale, ignored, odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, ignored=ignored)
    inputs["hidden_states"][::2] *= scale
    budget = chunk_mib(5, 131, dtype)
    check_log_probs(inputs, labels, outputs=("lse", "is_top1"), chunk_mib=budget)


@pytest.mark.parametrize("shape", [(130, 8, 128), (3, 64, 257), (2, 8, 2), (2, 16, 9001)], ids=str)
def test_statistics_of_any_shape(shape, bf16_odds):
    inputs, labels = linear_inputs(torch.bfloat16, bf16_odds, *shape, ignored=0.0)
    labels[-1] = shape[-1] - 1
    check_log_probs(inputs, labels, outputs=STATISTICS)


@pytest.mark.parametrize("options", [{}, {"softcap": 200.0}], ids=str)
def test_statistics_of_losses_beyond_60_nats(options, bf16_odds):
    inputs, labels = linear_inputs(torch.bfloat16, bf16_odds, ignored=0.1)
    inputs["hidden_states"][::2] *= 100
    budget = chunk_mib(7, 131, torch.bfloat16)
    ours = check_log_probs(inputs, labels, outputs=STATISTICS, chunk_mib=budget, **options)
    assert ours["log_probs"].min() < -60


@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=["", "frozen head"])
@pytest.mark.parametrize("names", [("log_probs",), ("entropy",), ("log_probs", "lse")], ids=str)
def test_gradients_that_differ_from_token_to_token(names, frozen, bf16_odds):
    inputs, labels = linear_inputs(torch.bfloat16, bf16_odds)
    upstream = {name: torch.arange(len(labels), device=bf16_odds) - 3.0 for name in names}
    how = {"outputs": STATISTICS, "chunk_mib": chunk_mib(5, 131, torch.bfloat16)}
    check_log_probs(inputs, labels, upstream=upstream, frozen=frozen, **how)


@pytest.mark.parametrize("name", ["entropy", "lse"])
def test_gradients_are_those_of_the_rounded_logits(name, bf16_odds, monkeypatch):
    """Odds are never rounded, the logits that gradients of entropy and lse come from are: with the
    lse of the former, a softmax of the latter would be off by as much as a logit is rounded.
    """
    inputs, labels = linear_inputs(torch.bfloat16, bf16_odds)
    logits_ = head_logits.logits_

    def rounded(out, operands):
        return out.copy_(logits_(out, operands).to(torch.bfloat16))

    if bf16_odds.type == "cpu":
        monkeypatch.setattr(head_logits, "logits_", rounded)
    upstream = {name: torch.ones(len(labels), device=bf16_odds)}
    check_log_probs(inputs, labels, upstream=upstream, outputs=STATISTICS)


def test_the_first_of_several_largest_is_top1(odds):
    """Of those in other tiles of classes than the label's."""
    device, dtype = odds
    weight = torch.randint(-2, 3, (400, 16), device=device).to(dtype)
    weight[[3, 200, 300]] = 3.0  # small integers: every product finds the same logits
    inputs = {"hidden_states": torch.ones_like(weight[:5]), "weight": weight}
    labels = torch.tensor([3, 200, 300, 50, -100], device=device)
    ours = check_log_probs(inputs, labels, outputs=("lse", "is_top1"))
    assert ours["is_top1"].tolist() == [True, False, False, False, False]
    weight[300] = 4.0
    ours = check_log_probs(inputs, labels, outputs=("lse", "is_top1"))
    assert ours["is_top1"].tolist() == [False, False, True, False, False]


def test_statistics_alone_are_those_with_gradients(odds):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, ignored=0.2)
    how = {"outputs": STATISTICS, "chunk_mib": chunk_mib(5, 131, dtype)}
    expected = check_log_probs(inputs, labels, **how)
    alone = linear_log_probs(**inputs, labels=labels, **how)
    for name in ("log_probs", *STATISTICS):
        assert torch.equal(getattr(alone, name), expected[name]), name


@pytest.mark.parametrize(
    ("statistics", "served"),
    [
        ((), True),
        (("entropy",), True),
        (STATISTICS, True),
        (("mean_logits",), False),
        (("entropy", "log_sum_sq_probs"), False),
    ],
    ids=str,
)
def test_which_statistics_are_served(statistics, served, monkeypatch):
    monkeypatch.setattr(odds_inputs, "is_hopper", lambda _: True)
    monkeypatch.setattr(odds_inputs, "takes_descriptors", lambda _: True)
    factors = HeadInputs(*(torch.zeros(n, 8, dtype=torch.bfloat16) for n in (5, 131)))
    assert odds_inputs.serves_odds(factors, LossOptions(), set(statistics)) is served


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"dtype": torch.float16}, False),
        ({"dtype": torch.float32}, False),
        ({"hidden_size": 36}, False),
        ({"bias": True}, False),
        ({"label_smoothing": 0.1}, False),
        ({"expanded": True}, False),
        ({"transposed": True}, False),
        ({"rank": 16}, True),
        ({"rank": 64}, True),
        ({"rank": 72}, False),
        ({"rank": 12}, False),
        ({"rank": 16, "unaligned": True}, False),
        ({"statistics": STATISTICS}, True),
        ({"statistics": ("mean_logits",)}, False),
    ],
    ids=str,
)
def test_what_is_served(change, served):
    how = {"dtype": torch.bfloat16, "hidden_size": 40, "bias": False, "label_smoothing": 0.0}
    how |= {"expanded": False, "transposed": False, "rank": 0, "unaligned": False}
    how |= {"statistics": ()} | change
    weight = torch.randn(136, how["hidden_size"], device="cuda", dtype=how["dtype"])
    hidden_states = torch.randn_like(weight)
    if how["expanded"]:
        hidden_states = hidden_states[:1].expand(136, -1)
    if how["transposed"]:
        weight = weight.t().contiguous().t()
    bias = weight[:, 0].contiguous() if how["bias"] else None
    options = LossOptions(label_smoothing=how["label_smoothing"])
    low_rank = (None, None)
    if how["rank"]:
        states = torch.randn(136, how["rank"] + 4, device="cuda", dtype=how["dtype"])
        states = states[:, 4:] if how["unaligned"] else states[:, :-4].contiguous()
        low_rank = states, states.clone()
    factors = HeadInputs(hidden_states, weight, bias, *low_rank)
    assert odds_inputs.serves_odds(factors, options, how["statistics"]) is served


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
def test_autocast_over_float32_weights(odds):
    device, _ = odds
    inputs, labels = linear_inputs(torch.float32, device, 50)

    def under_autocast(function):
        with torch.autocast("cuda", torch.bfloat16):
            return function()

    ours = loss_and_gradients(
        lambda **x: under_autocast(lambda: linear_cross_entropy(**x, labels=labels)), inputs
    )
    eager = loss_and_gradients(
        lambda **x: eager_cross_entropy(under_autocast(lambda: linear(*x.values())), labels), inputs
    )
    truth = loss_and_gradients(
        lambda **x: eager_cross_entropy(linear(*x.values()), labels),
        {name: value.double() for name, value in inputs.items()},
    )
    assert_no_worse(ours, eager, truth, torch.bfloat16)
    assert ours["weight"].dtype == torch.float32
