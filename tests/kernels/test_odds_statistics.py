"""Log-probabilities from odds, and the statistics beside them."""

from functools import partial

import pytest
import torch
from log_probs_ways import check_log_probs
from odds_cases import MARKS, STATISTICS, in_float32
from three_ways import chunk_mib, linear_inputs

from liger_patch.kernels.head import logits as head_logits
from liger_patch.kernels.linear_log_probs import linear_log_probs

pytestmark = MARKS


@pytest.fixture
def bf16_odds(odds, monkeypatch):
    """The device, for inputs in bf16, whose values the interpreter has in float32."""
    device, _ = odds
    if device.type == "cpu":
        monkeypatch.setattr(
            "log_probs_ways.linear_log_probs", partial(in_float32, linear_log_probs)
        )
    return device


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


@pytest.mark.parametrize("shape", [(130, 8, 128), (3, 64, 257), (2, 8, 2), (2, 16, 2001)], ids=str)
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


@pytest.mark.parametrize("rank", [0, 8])
def test_rows_of_other_weights_are_computed_again(rank, bf16_odds):
    inputs, labels = linear_inputs(torch.bfloat16, bf16_odds, 20, rank=rank)
    weights = torch.arange(20.0, device=bf16_odds) - 5
    upstream = {"log_probs": torch.where(weights.abs() < 4, -0.5, 0.3) * weights}
    how = {"row_weights": weights, "chunk_mib": chunk_mib(5, 131, torch.bfloat16)}
    check_log_probs(inputs, labels, upstream=upstream, outputs=("entropy",), **how)


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
