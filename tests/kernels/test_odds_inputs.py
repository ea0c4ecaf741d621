"""Which inputs odds are computed of, and which are left to the kernels of other GPUs."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
from odds_cases import MARKS, STATISTICS
from three_ways import check_linear, linear_inputs

from liger_patch.kernels.head import odds
from liger_patch.kernels.head.inputs import HeadInputs
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.options import LossOptions

pytestmark = MARKS

SMALL_BATCH = "liger_patch.kernels.head.odds.SMALL_BATCH"


def refuse_odds(monkeypatch):
    """From here on, a test in which odds are computed fails."""
    refused = Mock(side_effect=AssertionError("odds are computed"))
    monkeypatch.setattr(odds.OddsForm, "run", refused)


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
    ("change", "on_hopper", "on_others"),
    [
        ({}, True, True),
        ({"dtype": torch.float16}, False, False),
        ({"dtype": torch.float32}, False, False),
        ({"hidden_size": 36}, False, True),
        ({"bias": True}, False, False),
        ({"label_smoothing": 0.1}, False, False),
        ({"expanded": True}, False, True),
        ({"transposed": True}, False, False),
        ({"writes_float32": False}, True, False),
        ({"rank": 16}, True, True),
        ({"rank": 64}, True, True),
        ({"rank": 72}, False, True),
        ({"rank": 12}, False, True),
        ({"rank": 16, "unaligned": True}, False, True),
        ({"statistics": ("entropy",)}, True, True),
        ({"statistics": STATISTICS}, True, True),
        ({"statistics": ("mean_logits",)}, False, True),
        ({"statistics": ("entropy", "log_sum_sq_probs")}, False, True),
    ],
    ids=str,
)
def test_what_is_served(change, on_hopper, on_others, monkeypatch):
    monkeypatch.setattr(odds, "is_hopper", lambda _: True)
    monkeypatch.setattr(odds, "takes_descriptors", lambda _: True)
    monkeypatch.setattr(odds, "writes_float32", lambda _: change.get("writes_float32", True))
    weight = torch.randn(136, change.get("hidden_size", 40)).to(change.get("dtype", torch.bfloat16))
    hidden_states = torch.randn_like(weight)
    if "expanded" in change:
        hidden_states = hidden_states[:1].expand(136, -1)
    if "transposed" in change:
        weight = weight.t().contiguous().t()
    bias = weight[:, 0].contiguous() if "bias" in change else None
    low_rank = (None, None)
    if "rank" in change:
        states = torch.randn(136, change["rank"] + 4).to(weight.dtype)
        states = states[:, 4:] if "unaligned" in change else states[:, :-4].contiguous()
        low_rank = states, states.clone()
    factors = HeadInputs(hidden_states, weight, bias, *low_rank)
    options = LossOptions(label_smoothing=change.get("label_smoothing", 0.0))
    assert odds.serves_odds(factors, options, set(change.get("statistics", ()))) is on_hopper
    assert odds.serves_row_odds(factors, options) is on_others
