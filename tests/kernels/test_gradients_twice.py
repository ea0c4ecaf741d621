"""More than one backward pass, and losses that are computed with before it."""

import pytest
import torch
from slow_cases import slow_but
from three_ways import check_linear, check_logits, linear_inputs, logits_inputs

from liger_patch.kernels.cross_entropy import cross_entropy
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FROZEN = [(), ("weight", "bias"), ("hidden_states",)]


def leaves_of(inputs, frozen=()):
    return {k: v.detach().clone().requires_grad_(k not in frozen) for k, v in inputs.items()}


@pytest.mark.parametrize("reduction", slow_but(["none", "mean"], ["none", "mean", "sum"]))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("frozen", FROZEN, ids=["", "frozen head", "frozen hidden states"])
def test_second_backward_pass_doubles_the_gradients(reduction, dtype, frozen, device):
    inputs, labels = linear_inputs(dtype, device, 7, bias=True)
    leaves = leaves_of(inputs, frozen)
    loss = linear_cross_entropy(**leaves, labels=labels, reduction=reduction)
    trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
    ones = torch.ones_like(loss)
    loss.backward(ones, retain_graph=True)
    once = [leaf.grad.clone() for leaf in trained]
    loss.backward(ones, retain_graph=True)
    torch.testing.assert_close(
        [leaf.grad for leaf in trained], [2 * g for g in once], rtol=0, atol=0
    )
    third = torch.autograd.grad(loss, trained, ones)
    torch.testing.assert_close(list(third), once, rtol=0, atol=0)


def test_second_backward_pass_doubles_the_gradient_of_logits(device):
    logits, labels = logits_inputs(torch.bfloat16, device)
    loss = cross_entropy(logits.requires_grad_(), labels)
    loss.backward(retain_graph=True)
    once = logits.grad.clone()
    loss.backward()
    assert torch.equal(logits.grad, 2 * once)


def test_second_backward_pass_needs_retain_graph():
    inputs, labels = linear_inputs(torch.float32, CPU)
    loss = linear_cross_entropy(**leaves_of(inputs), labels=labels)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_backward_pass_over_a_changed_weight_is_an_error():
    inputs, labels = linear_inputs(torch.float32, CPU)
    leaves = leaves_of(inputs)
    loss = linear_cross_entropy(**leaves, labels=labels)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        leaves["weight"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("operator", ["linear_cross_entropy", "cross_entropy"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_second_derivative_is_refused(operator, reduction, device):
    inputs, labels = linear_inputs(torch.float32, device)
    logits, _ = logits_inputs(torch.float32, device)
    if operator == "cross_entropy":
        leaf = logits.requires_grad_()
        loss = cross_entropy(leaf, labels, reduction=reduction)
    else:
        leaf = inputs["hidden_states"].requires_grad_()
        loss = linear_cross_entropy(leaf, inputs["weight"], labels, reduction=reduction)
    with pytest.raises(RuntimeError, match=f"{operator} has no second derivative"):
        torch.autograd.grad(loss.sum(), leaf, create_graph=True)


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
