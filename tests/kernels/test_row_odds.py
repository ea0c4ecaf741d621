"""Odds from logits, in one walk: losses and gradients of what GPUs other than Hopper's run."""

import pytest
import torch
from exactness import assert_no_worse
from log_probs_ways import check_log_probs
from odds_cases import SERVED
from operators import padded, strided, transposed
from slow_cases import slow_but
from three_ways import (
    check_linear,
    eager_cross_entropy,
    filled,
    linear_inputs,
    results_and_gradients,
)
from torch.nn.functional import linear

from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.triton import row_odds as kernels

pytestmark = pytest.mark.filterwarnings(  # of the interpreter's numpy
    "ignore:(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning"
)


@pytest.mark.parametrize("view", slow_but([strided], [transposed, strided, padded]))
@pytest.mark.parametrize("argument", ["hidden_states", "weight", "low_rank", "low_rank_weight"])
def test_inputs_of_any_strides(view, argument, row_odds):
    """Odds serve rows whose elements lie side by side, and logits all others."""
    device, dtype = row_odds
    inputs, labels = linear_inputs(dtype, device, 20, rank=20)
    check_linear(inputs, labels)
    inputs[argument] = view(inputs[argument])
    check_linear(inputs, labels)


def test_a_larger_logit_in_every_block(row_odds):
    """What has been written of a row is scaled again and again, as far as to 0."""
    device, dtype = row_odds
    vocab_size = 4 * kernels.BLOCK["BLOCK_V"] + 5
    inputs, labels = linear_inputs(dtype, device, 6, 8, vocab_size, ignored=0.0)
    steps = torch.arange(vocab_size, device=device) * (220 / vocab_size)
    inputs["weight"] = torch.zeros_like(inputs["weight"])
    inputs["weight"][:, 0] = steps.to(dtype)
    inputs["hidden_states"][:, 0] = torch.tensor([1.0, 0.5, 0.25, -1.0, 0.125, -0.5], device=device)
    labels[:] = torch.tensor([0, 1, vocab_size // 2, vocab_size - 1, 3, 9], device=device)
    ours = results_and_gradients(lambda **x: linear_cross_entropy(**x, labels=labels), inputs)
    wide = {name: value.double() for name, value in inputs.items()}
    plain, truth = (
        results_and_gradients(lambda **x: eager_cross_entropy(linear(*x.values()), labels), each)
        for each in (inputs, wide)
    )
    # float32 rounds the logits times log2(e), here up to 317: 64 roundings of 1 are 5 of those
    assert_no_worse(ours, plain, truth, dtype, eps=64 if dtype == torch.float32 else 1)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_loss_with_gradients_is_that_without(name, row_odds):
    device, dtype = row_odds
    inputs, labels = linear_inputs(dtype, device, 20, ignored=0.2)
    inputs["weight"][: kernels.BLOCK["BLOCK_V"]] *= 0.1  # a later block has larger logits
    options = filled(SERVED[name], len(labels), 131, device)

    def losses(**x):
        return linear_cross_entropy(**x, labels=labels, reduction="none", **options)

    alone = losses(**inputs)
    of_training = results_and_gradients(losses, inputs, torch.ones(20, device=device))["loss"]
    assert torch.equal(of_training, alone)


def test_log_probs_of_rows_that_are_computed_again(row_odds):
    device, dtype = row_odds
    inputs, labels = linear_inputs(dtype, device, 20, rank=8)
    weights = torch.arange(20.0, device=device) - 5
    upstream = {"log_probs": torch.where(weights.abs() < 4, -0.5, 0.3) * weights}
    check_log_probs(inputs, labels, upstream=upstream, outputs=(), row_weights=weights)


def test_statistics_beside_the_gradients(row_odds):
    device, dtype = row_odds
    inputs, labels = linear_inputs(dtype, device, 20, ignored=0.0)
    check_log_probs(inputs, labels, outputs=("entropy", "lse", "is_top1", "mean_logits"))
