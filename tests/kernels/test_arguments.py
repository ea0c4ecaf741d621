"""Arguments that do not fit: ValueError that names the argument and its value."""

import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import zeros
from torch.testing._internal.two_tensor import TwoTensor

from liger_patch import kernels
from liger_patch.kernels.cross_entropy import cross_entropy
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.linear_distillation import linear_distillation
from liger_patch.kernels.linear_log_probs import linear_log_probs
from liger_patch.kernels.rotary import rotary

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
    ("num_items_in_batch", True, "True"),
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
HEAD = {"hidden_states": torch.ones(N, H), "weight": torch.ones(V, H), "labels": LABELS}
X, Q, COS = zeros(2, 8), zeros(2, 3, 5, 8), zeros(1, 5, 8)
STUDENT = {"student_hidden": torch.ones(12, 40), "student_weight": torch.ones(131, 40)}
STUDENT["labels"] = torch.zeros(12, dtype=torch.int64)
TEACHER = {"teacher_hidden": torch.ones(12, 56), "teacher_weight": torch.ones(131, 56)}
TOP_K = {"teacher_log_probs": -torch.ones(12, 7)}
TOP_K["teacher_indices"] = torch.zeros(12, 7, dtype=torch.int64)


def from_likeliest(**arguments: Any) -> Any:
    """Distillation from the likeliest classes."""
    return linear_distillation(**arguments)


FITTING: dict[Callable[..., Any], dict[str, Any]] = {
    rotary: {"q": Q, "k": Q, "cos": COS, "sin": COS},
    linear_cross_entropy: HEAD,
    linear_log_probs: HEAD,
    cross_entropy: {"logits": torch.ones(N, V), "labels": LABELS},
    linear_distillation: STUDENT | TEACHER,
    from_likeliest: STUDENT | TOP_K,
}


def adapter(
    states: tuple[int, ...] = (N, 2), weight: tuple[int, ...] = (V, 2)
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {"low_rank": (zeros(states), zeros(weight))}


WRONG: dict[Callable[..., Any], list[tuple[dict[str, Any], str]]] = {
    rotary: [
        ({"grouped": True}, "grouped must be False where interleaved is, got True"),
        ({"q": X}, "q must be floating point"),
        ({"k": Q[:, :, :2]}, "k must be"),
        ({"cos": COS[:, :2]}, "cos must have shape"),
        ({"cos": COS[..., :3], "sin": COS[..., :3]}, "cos must have an even R"),
        (
            {"interleaved": True},
            r"cos must have an even R of at most 8 features, got \(1, 5, 8\), 16 features",
        ),
        ({"sin": COS[..., :4]}, r"sin must have shape \(1, 5, 8\) as cos has, got \(1, 5, 4\)"),
        ({"sin": COS > 0}, "sin must be floating point, got torch.bool"),
        ({"cos": COS.clone().requires_grad_()}, "cos must not require"),
        ({"sin": COS.to("meta")}, "sin must be on cpu"),
    ],
    linear_cross_entropy: [
        ({"low_rank": (None, None)}, "low_rank must be two tensors"),
        ({"low_rank": torch.zeros(N, 2)}, "low_rank must be two tensors"),
        ({"low_rank": (torch.zeros(N, 2),)}, "low_rank must be two tensors"),
        (adapter((N,)), r"low_rank\[0\] must have shape \(4, R\), got \(4,\)"),
        (adapter((N - 1, 2)), r"low_rank\[0\] must have shape \(4, R\), got \(3, 2\)"),
        (adapter(weight=(V, 3)), r"low_rank\[1\] must have shape \(8, 2\), got \(8, 3\)"),
        (adapter(weight=(2, V)), r"low_rank\[1\] must have shape \(8, 2\), got \(2, 8\)"),
        ({"weight": np.ones((V, H))}, "weight must be a tensor, got ndarray"),
    ],
    linear_distillation: [
        ({"divergence": "kl"}, r"divergence must be one of \('forward_kl', .*, got 'kl'"),
        ({"divergence": "jsd", "beta": 1.5}, r"beta must be in \[0, 1\], got 1.5"),
        ({"divergence": "tvd", "beta": 0.0}, "beta must be None.* got 0.0 for 'tvd'"),
        ({"temperature": 0.0}, "temperature must be > 0, got 0.0"),
        ({"ce_weight": -1.0}, "ce_weight must be >= 0, got -1.0"),
        ({"ce_weight": 0.5, "labels": None}, "ce_weight=0.5 needs labels, got None"),
        ({"reduction": "none"}, 'reduction must be "mean" or "sum", got \'none\''),
        ({"student_hidden": torch.ones(3)}, r"student_hidden must have shape \(N, H\), got \(3,\)"),
        ({"student_hidden": 1}, "student_hidden must be a tensor, got int"),
        ({"teacher_hidden": torch.ones(11, 56)}, "teacher_hidden must have 12 rows on cpu"),
        ({"student_weight": torch.ones(9, 3)}, r"student_weight must have shape \(V, 40\) with"),
        ({"teacher_weight": torch.ones(9, 3)}, r"teacher_weight must have shape \(V, 56\) with"),
        ({"bias": torch.ones(3)}, r"^bias must have shape \(131,\), got \(3,\)"),
        ({"softcap": -1.0}, "^softcap must be a finite number > 0 or None, got -1.0"),
        ({"teacher_softcap": 0.0}, "teacher_softcap must be a finite number > 0 or None, got 0.0"),
        ({"teacher_logit_scale": "a"}, "teacher_logit_scale must be a number, got 'a'"),
        ({"labels": torch.full((12,), 131)}, r"labels must be in \[0, 131\) or ignore_index"),
        ({"labels": torch.ones(12)}, "labels must be an integer tensor, got torch.float32"),
        ({"token_weight": torch.ones(3)}, r"token_weight must have shape \(12,\), got \(3,\)"),
        ({"num_items_in_batch": -1}, "num_items_in_batch must be a finite number >= 0, got -1"),
        (
            {"entropy_out": torch.ones(3)},
            r"entropy_out must be floating-point \(12,\), got torch.float32 \(3,\)",
        ),
        ({"entropy_out": torch.ones(12, dtype=torch.int64)}, r"got torch.int64 \(12,\)"),
        ({"entropy_out": [1.0]}, "entropy_out must be a tensor, got list"),
        ({"chunk_mib": 0}, "chunk_mib must be a finite number of MiB > 0 or None, got 0"),
    ],
    from_likeliest: [
        ({"divergence": "jsd"}, "for divergence='forward_kl', ce_weight=0 and .* got 'jsd', 0.0"),
        ({"ce_weight": 0.5}, "ce_weight=0 and entropy_out=None, got 'forward_kl', 0.5 and a None"),
        ({"entropy_out": torch.ones(12)}, "got 'forward_kl', 0.0 and a Tensor"),
        ({"teacher_hidden": torch.ones(12, 3)}, "take the place of teacher_hidden and its head"),
        ({"teacher_indices": None}, "teacher_indices must be a tensor, got NoneType"),
        (
            {"teacher_log_probs": torch.ones(3, 2)},
            r"of shape \(12, K <= 131\) on cpu, got .*\(3, 2\)",
        ),
        ({"teacher_indices": torch.ones(12, 7)}, "teacher_indices must be torch.int64 of shape"),
        ({"teacher_indices": torch.full((12, 7), 131)}, r"must be in \[0, 131\), got 131 \(84"),
    ],
}


NAMED = {linear_cross_entropy: BOTH + LINEAR, cross_entropy: BOTH + LOGITS}
NAMED[linear_log_probs] = LOG_PROBS


ARGUMENT_ERRORS = [
    (operator, {name: value}, f"{name}.*{re.escape(shown)}")
    for operator, rows in NAMED.items()
    for name, value, shown in rows
]
ARGUMENT_ERRORS += [(operator, *row) for operator, rows in WRONG.items() for row in rows]


def call(operator: Callable[..., Any], **changes: Any) -> Any:
    return operator(**FITTING[operator] | changes)


@pytest.mark.parametrize(
    ("operator", "changes", "message"),
    [pytest.param(*row, id=f"{row[0].__name__}-{'-'.join(row[1])}") for row in ARGUMENT_ERRORS],
)
def test_what_does_not_fit_is_an_error_that_names_it(operator, changes, message):
    with pytest.raises(ValueError, match=message):
        call(operator, **changes)


both_losses = pytest.mark.parametrize("loss", [linear_cross_entropy, cross_entropy])


@both_losses
def test_numbers_of_numpy_are_numbers(loss):
    numbers = {"softcap": 30.0, "z_loss": 0.5, "logit_scale": 2.0, "num_items_in_batch": 3.0}
    ours = call(loss, **{name: np.float32(value) for name, value in numbers.items()})
    assert torch.equal(ours, call(loss, **numbers))


@both_losses
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_number_of_items_without_a_mean_is_an_error(loss, reduction):
    with pytest.raises(ValueError, match=f"num_items_in_batch.*'{reduction}'"):
        call(loss, num_items_in_batch=3, reduction=reduction)


@both_losses
@pytest.mark.parametrize("items", [6, torch.tensor(6), torch.tensor([6.0]), torch.tensor([[6]])])
def test_number_of_items_in_any_form(loss, items):
    torch.testing.assert_close(
        call(loss, num_items_in_batch=items), call(loss, reduction="sum") / 6
    )


@both_losses
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64, torch.bfloat16], ids=str)
def test_token_weights_of_any_dtype(loss, dtype):
    weight = torch.tensor([1, 0, 1, 1])
    expected = call(loss, token_weight=weight.float(), reduction="none")
    found = call(loss, token_weight=weight.to(dtype), reduction="none")
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_labels_on_another_device_are_an_error():
    device = torch.device("cuda")
    hidden_states, weight = torch.ones(N, H, device=device), torch.ones(V, H, device=device)
    with pytest.raises(ValueError, match="labels must be on cuda:0, got cpu"):
        call(linear_cross_entropy, hidden_states=hidden_states, weight=weight)
    with pytest.raises(ValueError, match="weight must be on cuda:0 as hidden_states are, got cpu"):
        call(linear_cross_entropy, hidden_states=hidden_states)


@pytest.mark.parametrize("name", ["hidden_states", "weight", "bias", "low_rank"])
def test_a_tensor_of_tensors_is_an_error_that_names_it(name):
    given = {**HEAD, "bias": torch.ones(V), "low_rank": torch.ones(N, 2)}
    given[name] = TwoTensor(given[name], given[name])
    given["low_rank"] = given["low_rank"], torch.ones(V, 2)
    named = r"low_rank\[0\]" if name == "low_rank" else name
    with pytest.raises(ValueError, match=f"{named} must be a plain tensor, got TwoTensor"):
        linear_cross_entropy(**given)


def test_a_batch_of_upstream_gradients_is_an_error_that_says_so():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(11, 8)
    losses = linear_cross_entropy(x, weight, torch.arange(3), reduction="none")
    with pytest.raises(RuntimeError, match="is_grads_batched=True is not supported"):
        torch.autograd.grad(losses, x, torch.eye(3), is_grads_batched=True)


@pytest.mark.parametrize(
    ("name", "function"), [("rotary", "rotary"), ("causal_conv", "run_causal_conv")]
)
def test_the_file_of_an_operator_can_be_imported_under_another_name(name, function):
    """As the link at the repository's root is."""
    file = Path(kernels.rotary.__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"kernels.{name}", file)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    module = importlib.import_module(f"liger_patch.kernels.{name}")
    assert getattr(again, function) is not getattr(module, function)
