"""The product that writes odds: losses and gradients, of every option, shape and chunk."""

import pytest
import torch
from odds_cases import MARKS, SERVED
from slow_cases import each_pair, slow_but
from three_ways import check_linear, chunk_mib, filled, linear_inputs, results_and_gradients

from liger_patch.kernels.head import odds as forms
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy

pytestmark = MARKS


@pytest.mark.parametrize("options", SERVED.values(), ids=SERVED)
def test_every_option(options, both_odds):
    device, dtype = both_odds
    inputs, labels = linear_inputs(dtype, device)
    options = filled(options, len(labels), 131, device)
    check_linear(inputs, labels, chunk_mib=chunk_mib(5, 131, dtype), **options)


@each_pair(
    reduction=["none", "mean", "sum"],
    frozen=[(), ("hidden_states",), ("weight",)],
    ignored=[0.0, 0.5],
)
def test_every_reduction_with_any_upstream_gradient(reduction, frozen, ignored, both_odds):
    device, dtype = both_odds
    inputs, labels = linear_inputs(dtype, device, ignored=ignored)
    upstream = torch.tensor(-1.7, device=device)
    if reduction == "none":
        upstream = torch.arange(len(labels), device=device) - 3.0
    check_linear(inputs, labels, upstream=upstream, frozen=frozen, reduction=reduction)


@pytest.mark.parametrize("rank", slow_but([24], [8, 16, 24, 64]))
@pytest.mark.parametrize(
    ("tokens", "frozen"),
    [
        (130, ()),  # two tiles of rows
        (60, ("weight",)),
        (60, ("hidden_states", "weight")),
    ],
    ids=str,
)
def test_an_adapter_of_any_rank(rank, tokens, frozen, both_odds):
    device, dtype = both_odds
    inputs, labels = linear_inputs(dtype, device, tokens, rank=rank, ignored=0.0)
    options = filled(SERVED["everything"], len(labels), 131, device)
    check_linear(inputs, labels, frozen=frozen, **options)
    inputs, labels = linear_inputs(dtype, device, 60, rank=rank)  # of fewer, errors are luck
    check_linear(inputs, labels, frozen=frozen, chunk_mib=chunk_mib(25, 131, dtype))


@pytest.mark.parametrize(
    "shape",
    [
        (150, 72, 131),  # two tiles of rows, the last with 5
        (20, 8, 128),  # exactly one tile of classes
        (3, 64, 257),  # a class alone in its tile
        (1, 8, 2),
        (2, 200, 20001),  # several blocks of other GPUs
    ],
    ids=str,
)
def test_any_shape(shape, both_odds):
    device, dtype = both_odds
    inputs, labels = linear_inputs(dtype, device, *shape, ignored=0.1)
    labels[0] = shape[-1] - 1
    check_linear(inputs, labels)


def test_losses_alone_are_those_with_gradients_and_take_no_logits(odds, record):
    device, dtype = odds
    inputs, labels = linear_inputs(dtype, device, 20, ignored=0.2)
    given = record(forms.OddsForm, "run", lambda *_, memory, **__: memory)
    with_gradients = results_and_gradients(
        lambda **x: linear_cross_entropy(**x, labels=labels, chunk_mib=chunk_mib(7, 131, dtype)),
        inputs,
    )["loss"]
    assert given
    assert all(memory is not None for memory in given)
    given.clear()
    alone = linear_cross_entropy(**inputs, labels=labels, chunk_mib=chunk_mib(7, 131, dtype))
    assert given
    assert all(memory is None for memory in given)
    assert torch.equal(alone, with_gradients)


def test_backward_twice_gives_the_same_bits(both_odds):
    """Also with ignored tokens: the second backward pass knows their number, the first did not."""
    device, dtype = both_odds
    inputs, labels = linear_inputs(dtype, device, 20, ignored=0.4)
    leaves = [value.requires_grad_() for value in inputs.values()]
    loss = linear_cross_entropy(*leaves, labels, chunk_mib=chunk_mib(7, 131, dtype))
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("ignored", slow_but([0.4], [0.0, 0.4, 0.95]))
@pytest.mark.parametrize("rows", [1, 2, 3, 19, 20])
def test_any_number_of_chunks(rows, ignored, both_odds):
    device, dtype = both_odds
    inputs, labels = linear_inputs(dtype, device, 20, ignored=ignored)
    check_linear(inputs, labels, chunk_mib=chunk_mib(rows, 131, dtype))


@pytest.mark.parametrize("columns", slow_but([16], [8, 16, 24]))
def test_rows_in_groups_of_any_size(columns, odds, monkeypatch):
    device, dtype = odds
    monkeypatch.setattr(forms, "GROUPED_COLUMNS", columns)
    forms.tile_constants.cache_clear()
    inputs, labels = linear_inputs(dtype, device, 260, 8, ignored=0.0)  # three tiles of rows
    check_linear(inputs, labels)
    forms.tile_constants.cache_clear()


def test_many_tokens_with_the_same_label(both_odds):
    device, dtype = both_odds
    inputs, labels = linear_inputs(dtype, device, 60, ignored=0.2)
    labels[labels % 3 == 0] = 5
    labels[10:40] = 7
    first, second = (check_linear(inputs, labels) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_inputs_in_padded_rows_and_strided_class_weights(both_odds):
    device, dtype = both_odds
    inputs, labels = linear_inputs(dtype, device)
    padded = {
        name: torch.nn.functional.pad(value, (0, 24))[:, :-24] for name, value in inputs.items()
    }
    assert padded["weight"].stride() == (64, 1)
    class_weight = torch.rand(262, device=device)[::2]
    check_linear(padded, labels, class_weight=class_weight)
    check_linear(inputs, labels, class_weight=class_weight)
