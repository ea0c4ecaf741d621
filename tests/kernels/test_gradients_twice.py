"""More than one backward pass, and losses that are computed with before it."""

import pytest
import torch
from slow_cases import slow_but
from three_ways import check_linear, check_logits, linear_inputs, logits_inputs

from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FROZEN = [(), ("weight", "bias"), ("hidden_states",)]


def leaves_of(inputs, frozen=()):
    return {k: v.detach().clone().requires_grad_(k not in frozen) for k, v in inputs.items()}


@pytest.mark.parametrize("factor", slow_but([-3.7], [-3.7, 1e4, 0.0]))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("frozen", FROZEN, ids=["", "frozen head", "frozen hidden states"])
def test_loss_times_a_number(factor, dtype, frozen, device):
    inputs, labels = linear_inputs(dtype, device, 7, bias=True)
    logits, _ = logits_inputs(dtype, device, 7)
    upstream = torch.tensor(factor, device=device)
    check_linear(inputs, labels, upstream=upstream, frozen=frozen)
    check_logits(logits, labels, upstream=upstream)


def in_place(loss, other):
    loss += other
    return loss


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize(
    "combine",
    [
        pytest.param(lambda loss, other: loss + other, id="sum"),
        pytest.param(lambda loss, other: 3 * other + loss, id="sum with factor"),
        pytest.param(in_place, id="in place"),
    ],
)
def test_loss_added_to_another(combine, reduction, device):
    inputs, labels = linear_inputs(torch.float32, device, bias=True)
    leaves = leaves_of(inputs)
    expected = check_linear(inputs, labels, reduction=reduction)
    loss = linear_cross_entropy(**leaves, labels=labels, reduction=reduction)
    other = 0.5 * leaves["hidden_states"].square().sum()
    factor = 3 if combine(torch.tensor(0.0), torch.tensor(1.0)) == 3 else 1
    combine(loss, other).sum().backward()
    terms = len(labels) if reduction == "none" else 1
    added = terms * factor * inputs["hidden_states"]
    torch.testing.assert_close(leaves["hidden_states"].grad, expected["hidden_states"] + added)
    torch.testing.assert_close(leaves["weight"].grad, expected["weight"], rtol=0, atol=0)
    torch.testing.assert_close(leaves["bias"].grad, expected["bias"], rtol=0, atol=0)


def test_losses_of_two_batches_share_a_weight(device):
    inputs, labels = linear_inputs(torch.float32, device, bias=True)
    leaves = leaves_of(inputs)
    first = linear_cross_entropy(**leaves, labels=labels)
    second = linear_cross_entropy(**leaves, labels=labels.flip(0))
    (first + second).backward()
    expected = [check_linear(inputs, y)["weight"] for y in (labels, labels.flip(0))]
    torch.testing.assert_close(leaves["weight"].grad, sum(expected), rtol=0, atol=0)
