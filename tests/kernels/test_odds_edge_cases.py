"""Losses from odds that overflow, of values that are extreme, and of labels that are outside."""

import math

import pytest
import torch
from odds_cases import MARKS
from slow_cases import slow_but
from three_ways import (
    check_linear,
    chunk_mib,
    eager_cross_entropy,
    linear_inputs,
    results_and_gradients,
)
from torch import Tensor
from torch.nn.functional import linear

from liger_patch.kernels.head import odds as forms
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.linear_log_probs import linear_log_probs

pytestmark = MARKS


def losses_of(inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """The losses of a training step: (N,)."""
    return results_and_gradients(
        lambda **x: linear_cross_entropy(**x, labels=labels, reduction="none"),
        inputs,
        torch.ones(len(labels), device=labels.device),
    )["loss"]


@pytest.mark.parametrize("scale", slow_but([100.0], [10.0, 100.0]))
@pytest.mark.parametrize("options", [{}, {"softcap": 200.0}, {"z_loss": 1e-3}], ids=str)
def test_losses_beyond_60_nats(scale, options, both_odds):
    """exp(z - z of the label) overflows: then each row is taken against its largest logit."""
    device, dtype = both_odds
    inputs, labels = linear_inputs(dtype, device, 20, ignored=0.1)
    inputs["hidden_states"] *= scale
    ours = check_linear(inputs, labels, chunk_mib=chunk_mib(7, 131, dtype), **options)
    assert ours["loss"] > 20
    losses = linear_cross_entropy(**inputs, labels=labels, reduction="none", **options)
    assert losses.max() > 60


def test_no_chunk_has_overflowed_before_it_runs(odds, monkeypatch, record):
    """The flag lies in memory that may have been used before: 1 would compute a chunk twice."""
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 20, ignored=0.2)
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **how: new_empty(*a, **how).fill_(1))
    flags = record(forms.OddsForm, "run", lambda form, *_, **__: form._overflow.item())
    linear_cross_entropy(**inputs, labels=labels, chunk_mib=chunk_mib(7, 131, dtype))
    assert len(flags) > 1
    assert not any(flags)


def test_one_row_beyond_60_nats_leaves_the_others_alone(both_odds):
    device, dtype = both_odds
    inputs, labels = linear_inputs(dtype, device, 9, ignored=0.0)
    one = dict(inputs, hidden_states=inputs["hidden_states"].clone())
    one["hidden_states"][4] *= -100
    calm, wild = (losses_of(x, labels) for x in (inputs, one))
    assert wild[4] > 60
    others = torch.arange(9, device=device) != 4
    assert torch.equal(calm[others], wild[others])


def test_probability_of_one(both_odds):
    """log(1 + others) keeps others that are below the last digit of 1."""
    device, dtype = both_odds
    weight = torch.eye(64, device=device, dtype=dtype)
    inputs = {"hidden_states": 25 * weight[:5], "weight": weight}
    ours = check_linear(inputs, torch.arange(5, device=device))
    expected = torch.tensor(math.log1p(63 * math.exp(-25)), device=device)
    torch.testing.assert_close(ours["loss"], expected, rtol=1e-5, atol=0, check_dtype=False)


def test_entropy_of_a_probability_of_one(odds):
    device, dtype = odds
    weight = torch.eye(64, device=device, dtype=dtype)
    labels, others = torch.arange(5, device=device), 63 * math.exp(-25)
    entropy = linear_log_probs(25 * weight[:5], weight, labels, outputs=("entropy",)).entropy
    expected = math.log1p(others) + 25 * others / (1 + others)
    torch.testing.assert_close(entropy, torch.full_like(entropy, expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_reach_the_loss_of_their_token(value, both_odds):
    device, dtype = both_odds
    inputs, labels = linear_inputs(dtype, device, 6, ignored=0.0)
    inputs["hidden_states"][2, 3] = value
    losses = losses_of(inputs, labels)
    eager = eager_cross_entropy(linear(*inputs.values()), labels, reduction="none")
    assert torch.equal(losses.isfinite(), eager.isfinite())


def test_impossible_label_costs_infinity(both_odds):
    device, dtype = both_odds
    inputs, labels = linear_inputs(dtype, device, 6, ignored=0.0)
    inputs["hidden_states"] = inputs["hidden_states"].abs()
    inputs["weight"][labels[2]] = -math.inf
    losses = losses_of(inputs, labels)
    assert losses.isposinf().equal(labels == labels[2])


def test_all_labels_ignored_gives_zero(both_odds):
    device, dtype = both_odds
    inputs, labels = linear_inputs(dtype, device, 6, ignored=0.0)
    check_linear(inputs, labels)  # odds are computed here
    ours = results_and_gradients(
        lambda **x: linear_cross_entropy(**x, labels=labels.fill_(-100)), inputs
    )
    assert all(not value.any() for value in ours.values())


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
