"""Arguments that do not fit: ValueError that names the argument and its value."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from liger_patch import kernels
from liger_patch.kernels.cross_entropy import cross_entropy
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.linear_log_probs import linear_log_probs

N, H, V = 4, 3, 8
META = torch.device("meta")
HUGE = 10**400  # no float

BOTH = [  # argument, value, what the message must hold
    ("labels", torch.zeros(N - 1, dtype=torch.int64), "(3,)"),
    ("labels", torch.zeros(N), "torch.float32"),
    ("labels", torch.zeros(N, dtype=torch.int64, device=META), "meta"),
    ("reduction", "average", "'average'"),
    ("reduction", None, "None"),
    ("softcap", 0.0, "0.0"),
    ("softcap", math.inf, "inf"),
    ("logit_scale", math.inf, "inf"),
    ("label_smoothing", -0.1, "-0.1"),
    ("label_smoothing", 1.1, "1.1"),
    ("z_loss", -1e-4, "-0.0001"),
    ("ignore_index", None, "None"),
    ("ignore_index", "-100", "'-100'"),
    ("softcap", "30", "'30'"),
    ("logit_scale", None, "None"),
    ("logit_scale", torch.tensor(0.5), "tensor(0.5"),
    ("label_smoothing", "0.1", "'0.1'"),
    ("z_loss", None, "None"),
    ("class_weight", torch.ones(V - 1), "(7,)"),
    ("class_weight", torch.ones(V, dtype=torch.int64), "torch.int64"),
    ("class_weight", torch.ones(V, device=META), "meta"),
    ("class_weight", torch.ones(V, requires_grad=True), "gradient"),
    ("token_weight", torch.ones(N + 1), "(5,)"),
    ("token_weight", torch.ones(N, device=META), "meta"),
    ("token_weight", torch.ones(N, requires_grad=True), "gradient"),
    ("softcap", np.float32("inf"), "inf"),
    ("logit_scale", -HUGE, "-10000"),
    ("num_items_in_batch", HUGE, "10000"),
    ("num_items_in_batch", -1, "-1"),
    ("num_items_in_batch", torch.ones(2), "(2,)"),
]
LINEAR = [
    ("hidden_states", torch.ones(N), "(4,)"),
    ("hidden_states", torch.ones(N, H, dtype=torch.int64), "torch.int64"),
    ("weight", torch.ones(V, H + 1), "(8, 4)"),
    ("weight", torch.ones(H), "(3,)"),
    ("weight", torch.ones(0, H), "(0, 3)"),
    ("weight", torch.ones(V, H, dtype=torch.int64), "torch.int64"),
    ("weight", torch.ones(V, H, device=META), "meta"),
    ("weight", torch.ones(V, H, dtype=torch.float64), "torch.float64"),
    ("weight", torch.ones(V, H).to_sparse(), "torch.sparse_coo"),
    ("vocab_shard", 2, "got 2"),
    ("hopper_kernels", "yes", "'yes'"),
    ("bias", torch.ones(V - 1), "(7,)"),
    ("bias", torch.ones(V, dtype=torch.int64), "torch.int64"),
    ("bias", torch.ones(V, device=META), "meta"),
    ("chunk_mib", "64", "'64'"),
    ("chunk_mib", 0, "0"),
    ("chunk_mib", math.inf, "inf"),
]
LOGITS = [
    ("logits", torch.ones(V), "(8,)"),
    ("logits", torch.ones(N, 0), "(4, 0)"),
    ("logits", torch.ones(N, V, dtype=torch.int64), "torch.int64"),
]

LOG_PROBS = [
    ("temperature", 0.0, "0.0"),
    ("temperature", math.inf, "inf"),
    ("temperature", "1", "'1'"),
    ("temperature", torch.tensor(1.0), "tensor(1.)"),
    ("outputs", "entropies", "'entropies'"),
    ("outputs", ("entropy", "loss"), "'loss'"),
    ("outputs", None, "None"),
    ("row_weights", torch.ones(N - 1), "(3,)"),
    ("row_weights", torch.ones(N, device=META), "meta"),
    ("row_weights", torch.ones(N, dtype=torch.complex64), "torch.complex64"),
    ("row_weights", torch.ones(N, requires_grad=True), "gradient"),
    ("row_weights", 1.0, "float"),
    ("softcap", 0.0, "0.0"),
    ("weight", torch.ones(V, H + 1), "(8, 4)"),
    ("labels", torch.tensor([0, V, 1, 2]), "got 8 (1 outside)"),
]


LABELS = torch.zeros(N, dtype=torch.int64)


def call_linear(operator=linear_cross_entropy, **changes):
    fitting = {"hidden_states": torch.ones(N, H), "weight": torch.ones(V, H), "labels": LABELS}
    return operator(**(fitting | changes))


def call_logits(**changes):
    return cross_entropy(**({"logits": torch.ones(N, V), "labels": LABELS} | changes))


def call_log_probs(**changes):
    return call_linear(linear_log_probs, **changes)


@pytest.mark.parametrize("call", [call_linear, call_logits])
def test_numbers_of_numpy_are_numbers(call):
    numbers = {"softcap": 30.0, "z_loss": 0.5, "logit_scale": 2.0, "num_items_in_batch": 3.0}
    ours = call(**{name: np.float32(value) for name, value in numbers.items()})
    assert torch.equal(ours, call(**numbers))


@pytest.mark.parametrize(
    ("call", "argument", "value", "shown"),
    [
        pytest.param(call, *row, id=f"{call.__name__}-{row[0]}-{row[2]}")
        for call, rows in {
            call_linear: BOTH + LINEAR,
            call_logits: BOTH + LOGITS,
            call_log_probs: LOG_PROBS,
        }.items()
        for row in rows
    ],
)
def test_what_does_not_fit_is_named(call, argument, value, shown):
    with pytest.raises(ValueError, match=argument) as error:
        call(**{argument: value})
    assert shown in str(error.value)


@pytest.mark.parametrize("call", [call_linear, call_logits])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_number_of_items_without_a_mean_is_an_error(call, reduction):
    with pytest.raises(ValueError, match=f"num_items_in_batch.*'{reduction}'"):
        call(num_items_in_batch=3, reduction=reduction)


@pytest.mark.parametrize("call", [call_linear, call_logits])
@pytest.mark.parametrize("items", [6, torch.tensor(6), torch.tensor([6.0]), torch.tensor([[6]])])
def test_number_of_items_in_any_form(call, items):
    torch.testing.assert_close(call(num_items_in_batch=items), call(reduction="sum") / 6)


@pytest.mark.parametrize("call", [call_linear, call_logits])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.bfloat16], ids=str)
def test_token_weights_of_any_dtype(call, dtype):
    weight = torch.tensor([1, 0, 1, 1])
    expected = call(token_weight=weight.float(), reduction="none")
    torch.testing.assert_close(call(token_weight=weight.to(dtype), reduction="none"), expected)


@pytest.mark.gpu
def test_labels_on_another_device_are_an_error():
    device = torch.device("cuda")
    hidden_states, weight = torch.ones(N, H, device=device), torch.ones(V, H, device=device)
    with pytest.raises(ValueError, match="labels must be on cuda:0, got cpu"):
        call_linear(hidden_states=hidden_states, weight=weight)
    with pytest.raises(ValueError, match="weight must be on cuda:0 as hidden_states are, got cpu"):
        call_linear(hidden_states=hidden_states)


@pytest.mark.parametrize("name", ["hidden_states", "weight", "bias", "low_rank"])
def test_a_tensor_of_tensors_is_an_error_that_names_it(name):
    given = {"hidden_states": torch.randn(3, 8), "weight": torch.randn(11, 8)}
    given |= {"bias": torch.randn(11), "low_rank": (torch.randn(3, 2), torch.randn(11, 2))}
    if name == "low_rank":
        states, weight = given["low_rank"]
        given["low_rank"] = TwoTensor(states, states), weight
    else:
        given[name] = TwoTensor(given[name], given[name])
    with pytest.raises(ValueError, match=f"{name} must be a plain tensor, got TwoTensor"):
        linear_cross_entropy(**given, labels=torch.zeros(3, dtype=torch.int64))


def test_a_batch_of_upstream_gradients_is_an_error_that_says_so():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(11, 8)
    losses = linear_cross_entropy(x, weight, torch.arange(3), reduction="none")
    with pytest.raises(RuntimeError, match="is_grads_batched=True is not supported"):
        torch.autograd.grad(losses, x, torch.eye(3), is_grads_batched=True)


@pytest.mark.parametrize("name", ["rms_norm", "rotary", "gated"])
def test_the_file_of_an_operator_can_be_imported_under_another_name(name):
    """As the link at the repository's root is."""
    file = Path(kernels.rms_norm.__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"kernels.{name}", file)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    function = getattr(again, name)
    assert function is not getattr(importlib.import_module(f"liger_patch.kernels.{name}"), name)
