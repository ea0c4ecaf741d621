"""The reference, which every other test takes as the truth, against torch.nn.functional."""

from functools import partial

import pytest
import torch
from slow_cases import each_pair
from three_ways import linear_inputs, logits_inputs
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.nn.functional import linear

from liger_patch.kernels import reference
from liger_patch.kernels.options import LossOptions

CPU = torch.device("cpu")


def assert_same(ours, theirs, logits):
    """Compare two losses of the logits, and their gradients."""
    leaf = logits.detach().requires_grad_()
    losses = ours(leaf), theirs(leaf)
    torch.testing.assert_close(*losses)
    upstream = 1 + torch.rand_like(losses[0])
    torch.testing.assert_close(*(torch.autograd.grad(loss, leaf, upstream) for loss in losses))


@each_pair(
    reduction=["none", "mean", "sum"],
    label_smoothing=[0.0, 0.2, 1.0],
    weighted=[False, True],
    ignore_index=[-100, 3],
)
def test_reference_is_torch_cross_entropy(reduction, label_smoothing, weighted, ignore_index):
    logits, labels = logits_inputs(torch.float64, CPU, ignore_index=ignore_index)
    class_weight = torch.rand(logits.shape[1], dtype=torch.float64) if weighted else None
    shared = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    options = LossOptions(class_weight=class_weight, **shared)
    ours = partial(reference.cross_entropy, labels=labels, options=options)
    theirs = partial(torch_cross_entropy, target=labels, weight=class_weight, **shared)
    assert_same(partial(ours, reduction=reduction), partial(theirs, reduction=reduction), logits)


def test_softcap_scale_z_loss_and_token_weight_are_their_formulas():
    logits, labels = logits_inputs(torch.float64, CPU, ignored=0.0)
    token_weight = torch.rand(len(labels), dtype=torch.float64)
    options = LossOptions(softcap=5.0, logit_scale=0.5, z_loss=0.1)
    given = {"labels": labels, "token_weight": token_weight, "options": options}

    def formula(x):
        z = 5.0 * torch.tanh(x * 0.5 / 5.0)
        losses = torch_cross_entropy(z, labels, reduction="none") + 0.1 * torch.logsumexp(z, 1) ** 2
        return (token_weight * losses).sum() / token_weight.sum()

    assert_same(partial(reference.cross_entropy, **given), formula, logits)


def test_minus_infinity_logits_are_as_in_torch():
    logits, labels = logits_inputs(torch.float64, CPU, ignored=0.0)
    logits[:, :7], labels[labels < 7] = -torch.inf, 7
    ours = partial(reference.cross_entropy, labels=labels)
    assert_same(ours, partial(torch_cross_entropy, target=labels), logits)


@pytest.mark.parametrize("items", [4, torch.tensor(4), torch.tensor([4])])
def test_num_items_in_batch_is_the_denominator(items):
    logits, labels = logits_inputs(torch.float64, CPU)
    torch.testing.assert_close(
        reference.cross_entropy(logits, labels, num_items_in_batch=items),
        reference.cross_entropy(logits, labels, reduction="sum") / 4,
    )


def test_linear_reference_is_linear_then_cross_entropy():
    inputs, labels = linear_inputs(torch.float64, CPU, bias=True)
    logits = linear(inputs["hidden_states"], inputs["weight"], inputs["bias"])
    torch.testing.assert_close(
        reference.linear_cross_entropy(**inputs, labels=labels), torch_cross_entropy(logits, labels)
    )
