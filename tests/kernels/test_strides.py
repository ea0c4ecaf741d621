"""Inputs that are not contiguous: transposed, strided, expanded, padded."""

import pytest
import torch
from slow_cases import slow_but
from three_ways import check_linear, check_logits, linear_inputs, logits_inputs

TOKENS, VOCAB = 7, 131


def transposed(x):
    return x.mT.contiguous().mT if x.dim() == 2 else strided(x)


def strided(x):
    """Every second element along each dimension of a larger tensor."""
    larger = x.new_full([2 * size for size in x.shape], 3)
    view = larger[tuple(slice(None, None, 2) for _ in x.shape)]
    return view.copy_(x)


def padded(x):
    """Rows with something behind them."""
    larger = x.new_full((*x.shape[:-1], x.shape[-1] + 5), 3)
    return larger[..., : x.shape[-1]].copy_(x)


def expanded(x):
    """The first row, or element, for all."""
    return x[:1].expand_as(x)


VIEWS = [transposed, strided, padded, expanded]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("argument", ["hidden_states", "weight", "bias"])
@pytest.mark.parametrize("ignored", slow_but([0.3], [0.0, 0.3]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_inputs_of_any_strides(view, argument, ignored, dtype, device):
    inputs, labels = linear_inputs(dtype, device, TOKENS, bias=True, ignored=ignored)
    inputs[argument] = view(inputs[argument])
    check_linear(inputs, labels)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("reduction", slow_but(["none"], ["none", "sum"]))
@pytest.mark.parametrize("argument", ["labels", "token_weight", "class_weight"])
def test_labels_and_weights_of_any_strides(view, reduction, argument, device):
    inputs, labels = linear_inputs(torch.float32, device, TOKENS, ignored=0.0)
    logits, _ = logits_inputs(torch.float32, device, TOKENS)
    tensors = {
        "labels": labels,
        "token_weight": torch.rand(TOKENS, device=device),
        "class_weight": torch.rand(VOCAB, device=device) + 0.5,
    }
    tensors[argument] = view(tensors[argument])
    check_linear(inputs, reduction=reduction, **tensors)
    check_logits(logits, reduction=reduction, **tensors)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_logits_of_any_strides(view, ignored, device):
    logits, labels = logits_inputs(torch.bfloat16, device, TOKENS, ignored=ignored)
    check_logits(view(logits), labels)


def test_upstream_gradient_of_any_strides(device):
    inputs, labels = linear_inputs(torch.float32, device, TOKENS, bias=True, ignored=0.0)
    logits, _ = logits_inputs(torch.float32, device, TOKENS)
    for view in (strided, expanded):
        upstream = view(torch.rand(TOKENS, device=device))
        check_linear(inputs, labels, reduction="none", upstream=upstream)
        check_linear(inputs, labels, reduction="none", upstream=upstream, frozen={"weight", "bias"})
        check_logits(logits, labels, reduction="none", upstream=upstream)


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("view", [transposed, strided])
def test_saved_tensors_that_hooks_give_other_strides(view, reduction, device):
    inputs, labels = linear_inputs(torch.float32, device, TOKENS, bias=True, ignored=0.3)
    logits, _ = logits_inputs(torch.float32, device, TOKENS)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, view):
        check_linear(inputs, labels, reduction=reduction)
        check_logits(logits, labels, reduction=reduction)
