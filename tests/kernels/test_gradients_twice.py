"""More than one backward pass, and losses that are computed with before it."""

import pytest
import torch
from three_ways import check_linear, linear_inputs

from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy

CPU = torch.device("cpu")


def leaves_of(inputs):
    return {k: v.detach().clone().requires_grad_() for k, v in inputs.items()}


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
