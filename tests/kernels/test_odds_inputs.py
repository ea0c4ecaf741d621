"""Which inputs odds are computed of, and which are left to the kernels of other GPUs."""

from functools import partial

import pytest
import torch
from odds_cases import IS_HOPPER, MARKS, STATISTICS
from three_ways import check_linear, linear_inputs

from liger_patch.kernels.head import hopper, odds
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.options import LossOptions

pytestmark = MARKS

SMALL_BATCH = "liger_patch.kernels.head.odds.SMALL_BATCH"


def refuse_odds(monkeypatch):
    """From here on, a test in which odds are computed fails."""

    def refused(*_, **__):
        raise AssertionError("odds are computed")

    monkeypatch.setattr(hopper.OddsForm, "run", refused)


def test_the_kernels_of_other_gpus_can_be_asked_for(odds, monkeypatch):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, ignored=0.2)
    check_linear(inputs, labels)

    refuse_odds(monkeypatch)
    operator = partial(linear_cross_entropy, hopper_kernels=False)
    check_linear(inputs, labels, operator=operator)
    # the gradients are computed again in the backward pass, by the same kernels
    upstream = torch.rand(len(labels), device=device)
    check_linear(inputs, labels, operator=operator, reduction="none", upstream=upstream)


def test_small_batches_run_the_kernels_of_other_gpus(odds, monkeypatch):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 12, ignored=0.2)
    check_linear(inputs, labels)

    refuse_odds(monkeypatch)
    monkeypatch.setattr(SMALL_BATCH, 12)
    check_linear(inputs, labels)
    for tokens, hopper_kernels in ((12, True), (11, None)):
        monkeypatch.setattr(SMALL_BATCH, tokens)
        operator = partial(linear_cross_entropy, hopper_kernels=hopper_kernels)
        with pytest.raises(AssertionError, match="odds are computed"):
            check_linear(inputs, labels, operator=operator)


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
    monkeypatch.setattr(odds, "is_hopper", lambda _: True)
    monkeypatch.setattr(odds, "takes_descriptors", lambda _: True)
    factors = HeadInputs(*(torch.zeros(n, 8, dtype=torch.bfloat16) for n in (5, 131)))
    assert odds.serves_odds(factors, LossOptions(), set(statistics)) is served


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
    assert odds.serves_odds(factors, options, how["statistics"]) is served
