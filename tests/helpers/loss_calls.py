"""Calls of the losses, with their options, whose truth is the same call outside of a graph."""

from collections.abc import Callable
from typing import Any

import torch
from exactness import assert_no_worse
from slow_cases import slow_but
from three_ways import linear_inputs
from torch import Tensor

from liger_patch import cross_entropy, linear_cross_entropy

Loss = Callable[..., Tensor]
NAMES = ("hidden_states", "weight")


def mean(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options: dict[str, Any] = {"softcap": 30.0, "logit_scale": 0.7, "label_smoothing": 0.1}
    options["class_weight"] = weight.new_ones(weight.shape[0]).cumsum(0) / weight.shape[0]
    return 2 * linear_cross_entropy(hidden_states * 1.5, weight, labels, **options)


def each_token(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    losses = linear_cross_entropy(hidden_states, weight, labels, reduction="none")
    return (losses * torch.arange(len(losses))).sum()


def frozen(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    states = hidden_states.tanh()
    losses = linear_cross_entropy(states, weight.detach(), labels, reduction="none", z_loss=0.1)
    return losses.square().sum() + weight.sum()


def with_adapter(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    low_rank = hidden_states[:, :3], weight[:, :3]
    bias = weight.sum(1)
    return linear_cross_entropy(hidden_states, weight, labels, bias=bias, low_rank=low_rank)


def ready_made(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(hidden_states @ weight.T, labels, z_loss=1e-2)


LOSSES = (mean, each_token, frozen, with_adapter, ready_made)
MANY = slow_but([mean, ready_made], LOSSES)


def inputs(
    tokens: int = 37, ignored: float = 0.3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    given, labels = linear_inputs(dtype, torch.device("cpu"), tokens, 16, 51, ignored=ignored)
    hidden_states, weight = (each.requires_grad_() for each in given.values())
    return hidden_states, weight, labels


def with_gradients(loss: Loss, *given: Tensor) -> dict[str, Any]:
    value = loss(*given)
    gradients = torch.autograd.grad(value, given[:2])
    return {"loss": value.detach(), **dict(zip(NAMES, gradients, strict=True))}


def assert_same(ours: dict[str, Any], loss: Loss, *given: Tensor) -> None:
    truth = with_gradients(loss, *given)
    assert_no_worse(ours, truth, truth, torch.float32)
