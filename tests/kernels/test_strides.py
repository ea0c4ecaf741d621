"""Inputs that are not contiguous: transposed, strided, expanded, padded."""

import pytest
import torch
from slow_cases import slow_but
from three_ways import check_linear, check_logits, linear_inputs, logits_inputs
from views import VIEWS, expanded, strided, transposed

TOKENS, VOCAB = 7, 131


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
