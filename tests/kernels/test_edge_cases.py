"""Edge cases of the operators, each by the fact that must hold."""

import math

import pytest
import torch
from slow_cases import each_pair
from three_ways import (
    LOW_DTYPES,
    OPTIONS,
    check_linear,
    check_logits,
    filled,
    linear_inputs,
    logits_inputs,
    results_and_gradients,
)
from torch.utils._python_dispatch import TorchDispatchMode

from liger_patch.kernels.cross_entropy import cross_entropy
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.linear_log_probs import linear_log_probs

REDUCTIONS = ("none", "mean", "sum")
# NumPy, with which Triton's interpreter computes, warns of the nan that is asked for here
not_a_number = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def all_zero(results):
    return all(not value.any() and value.isfinite().all() for value in results.values())


@each_pair(reduction=REDUCTIONS, dtype=LOW_DTYPES, tokens=[0, 5])
def test_all_labels_ignored_gives_zero(reduction, dtype, tokens, device):
    inputs, labels = linear_inputs(dtype, device, tokens, bias=True, ignored=1.1)
    logits, _ = logits_inputs(dtype, device, tokens)
    every = [{}, OPTIONS["everything"]]
    if reduction == "mean":
        every += [{"num_items_in_batch": items} for items in (0, 3, True)]
    for options in every:
        options = filled(options, tokens, 131, device) | {"reduction": reduction}
        assert all_zero(check_linear(inputs, labels, **options))
        assert all_zero(check_logits(logits, labels, **options))


@pytest.mark.parametrize("weights", ["token_weight", "class_weight"])
def test_weights_that_add_up_to_nothing_give_zero(weights, device):
    inputs, labels = linear_inputs(torch.float32, device, bias=True)
    size = len(labels) if weights == "token_weight" else 131
    zeros = {weights: torch.zeros(size, device=device)}
    assert all_zero(check_linear(inputs, labels, **zeros))
    assert all_zero(check_linear(inputs, labels, **zeros, num_items_in_batch=0))


@pytest.mark.parametrize("options", [{"label_smoothing": 0.3}, {"z_loss": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_a_mean_over_labels_whose_classes_weigh_nothing_is_zero(dtype, options, device):
    """PyTorch's is nan. Their losses are not 0: they are those of the other classes."""
    class_weight = torch.rand(131, device=device)
    class_weight[:66] = 0
    options = {"class_weight": class_weight, **options}
    inputs, labels = linear_inputs(dtype, device, bias=True)
    logits, _ = logits_inputs(dtype, device)
    labels = torch.where(labels == -100, labels, labels // 2)
    assert all_zero(check_linear(inputs, labels, **options))
    assert all_zero(check_logits(logits, labels, **options))
    assert check_linear(inputs, labels, **options, num_items_in_batch=3)["loss"] > 0


@pytest.mark.parametrize("items", [0, torch.tensor(0)], ids=["int", "tensor"])
def test_a_number_of_items_of_0_counts_as_1(items, device):
    inputs, labels = linear_inputs(torch.float32, device, 5)
    results = [
        linear_cross_entropy(**inputs, labels=labels, num_items_in_batch=n) for n in (items, 1)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("label", [-1, -101, 131, 10**12, -(2**62)])
@pytest.mark.parametrize("position", [0, 11])
def test_label_outside_the_vocabulary_is_an_error(label, position, device):
    inputs, labels = linear_inputs(torch.float32, device)
    logits, _ = logits_inputs(torch.float32, device)
    labels[position] = label
    expected = rf"labels must be in \[0, 131\) or ignore_index \(-100\), got {label} "
    with pytest.raises(ValueError, match=expected):
        linear_cross_entropy(**inputs, labels=labels)
    with pytest.raises(ValueError, match=expected):
        cross_entropy(logits, labels)


@pytest.mark.parametrize("ignore_index", [0, 5, 130, -1, 131, 10**12])
def test_any_ignore_index_also_within_the_vocabulary(ignore_index, device):
    inputs, labels = linear_inputs(torch.float32, device, ignore_index=ignore_index)
    logits, _ = logits_inputs(torch.float32, device)
    check_linear(inputs, labels, ignore_index=ignore_index)
    check_logits(logits, labels, ignore_index=ignore_index)


@not_a_number
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_states", math.nan),
        ("hidden_states", math.inf),
        ("hidden_states", -math.inf),
        ("logits", math.nan),
        ("logits", math.inf),
    ],
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nan_and_infinity_reach_the_loss(name, value, reduction, device):
    inputs, labels = linear_inputs(torch.float32, device, ignored=0.0)
    operator = linear_cross_entropy
    if name == "logits":
        inputs, operator = {name: torch.nn.functional.linear(*inputs.values())}, cross_entropy
    inputs[name][4, 2] = value
    ours = results_and_gradients(
        lambda **x: operator(**x, labels=labels, reduction=reduction), inputs
    )
    loss = ours["loss"]
    assert loss[4].isnan() if reduction == "none" else loss.isnan()
    assert ours[name][4].isnan().all()
    assert name == "logits" or ours["weight"].isnan().any()
    others = [row for row in range(len(labels)) if row != 4]
    assert ours[name][others].isfinite().all()


def test_minus_infinity_at_the_label_is_an_infinite_loss(device):
    logits, labels = logits_inputs(torch.float32, device, ignored=0.0)
    logits[4, labels[4]] = -math.inf
    losses = cross_entropy(logits, labels, reduction="none")
    assert losses[4] == math.inf
    assert losses.isfinite().sum() == len(labels) - 1


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("frozen", [(), ("weight", "bias")], ids=["", "frozen head"])
def test_masked_average_by_the_caller_over_long_runs_of_ignored_labels(dtype, frozen, device):
    """Losses per token, masked and averaged by the caller, as reinforcement learning does."""
    inputs, labels = linear_inputs(dtype, device, 40, 20, 67, bias=True, ignored=0.0)
    labels[3:30] = labels[35:] = -100
    upstream = (labels != -100) * torch.rand(40, device=device) / 8
    upstream[1] = 0
    ours = check_linear(inputs, labels, upstream=upstream, reduction="none", frozen=frozen)
    assert not ours["loss"][3:30].any()
    assert not ours["hidden_states"][3:30].any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_loss_scale_in_float16_loses_no_small_gradient(reduction, device):
    inputs, labels = linear_inputs(torch.float16, device, 16, 20, 1021, ignored=0.0)
    inputs["hidden_states"] /= 32  # every p is about 1 / 1021
    scale = torch.tensor(65536.0, device=device)
    upstream = scale if reduction == "mean" else (scale / 16).expand(16)
    ours = check_linear(inputs, labels, reduction=reduction, upstream=upstream)
    exact = results_and_gradients(
        lambda **x: linear_cross_entropy(**x, labels=labels, reduction=reduction),
        {name: value.double() for name, value in inputs.items()},
        upstream,
    )
    for name in inputs:
        seen = exact[name].abs() >= torch.finfo(torch.float16).tiny
        assert ours[name][seen].all()
        assert ours[name].isfinite().all()


def test_one_class_has_no_loss(device):
    inputs, labels = linear_inputs(torch.float32, device, 5, 7, 1)
    assert not check_linear(inputs, labels)["loss"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("weights", ["class_weight", "token_weight"])
def test_labels_of_few_bits_among_many_classes(dtype, weights, device):
    """Their dtype cannot hold V - 1, and uint8 takes -100 for 156."""
    inputs, labels = linear_inputs(torch.float32, device, 60, 8, 300, ignored=0.0)
    labels = (labels % 120).masked_fill(labels % 2 == 0, 100 if dtype == torch.int8 else 156)
    options = {weights: torch.rand(300 if weights == "class_weight" else 60, device=device)}
    labels[1] = 3
    logits = torch.nn.functional.linear(*inputs.values())
    for ignore_index in (-100, 3):
        check_linear(inputs, labels.to(dtype), ignore_index=ignore_index, **options)
        check_logits(logits, labels.to(dtype), ignore_index=ignore_index, **options)


class NothingBetweenRows(TorchDispatchMode):
    """Fails where a matrix product is given rows with unwritten memory between them: oneDNN reads
    it in bf16 on CPUs with AMX.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::addmm"):
            for each in args:
                if isinstance(each, torch.Tensor) and each.dim() == 2:
                    check_between_rows(each if each.stride(1) == 1 else each.t())
        return func(*args, **(kwargs or {}))


def check_between_rows(matrix):
    rows, columns = matrix.shape
    if rows > 1 and matrix.stride(1) == 1 and matrix.stride(0) > columns:
        whole = matrix.as_strided((rows - 1, matrix.stride(0)), (matrix.stride(0), 1))
        assert whole[:, columns:].isfinite().all()


@each_pair(
    vocab_size=[97, 131, 1000],
    dtype=[torch.float32, torch.bfloat16],
    operator=["linear_cross_entropy", "linear_log_probs"],
)
def test_products_read_no_memory_between_rows(operator, dtype, vocab_size, cpu_form):
    x = torch.randn(9, 16).to(dtype).requires_grad_()
    weight = torch.randn(vocab_size, 16).to(dtype).requires_grad_()
    labels = torch.arange(9)
    with NothingBetweenRows():
        if operator == "linear_cross_entropy":
            loss = linear_cross_entropy(x, weight, labels, chunk_mib=4 * vocab_size * 4 / 2**20)
        else:
            results = linear_log_probs(x, weight, labels, outputs=["entropy"])
            loss = (results.log_probs + results.entropy).sum()
        loss.backward()
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()
