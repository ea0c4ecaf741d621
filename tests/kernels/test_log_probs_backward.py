"""The backward pass of log-probabilities: where chunks are computed again, with the same bits, and
what it refuses.
"""

import math
from itertools import product

import pytest
import torch
from log_probs_ways import check_log_probs, upstream_of
from slow_cases import slow_but
from three_ways import LOW_DTYPES, chunk_mib, linear_inputs, paired, results_and_gradients

from liger_patch.kernels import linear_log_probs as operator
from liger_patch.kernels.linear_log_probs import linear_log_probs

CPU = torch.device("cpu")


@pytest.fixture
def passes(record):
    """The rows of each pass through the chunks that computes gradients, and 0 of each other."""

    def rows(config, inputs, row_scale, wanted, **how):
        return len(row_scale) if any(wanted) else 0

    return record(operator, "run_chunks", rows)


PASSES = [  # frozen, upstream, same_gradient, whether each pass computes gradients
    ((), "mean", True, [True]),
    ((), "sum_times", True, [True]),
    ((), "mean", False, [False, True]),
    ((), "per_token", True, [True, True]),
    ((), "per_token", False, [False, True]),
    ((), "zero_for_some", True, [True, True]),
    ((), "entropy", True, [True, True]),
    ((), "all", False, [False, True]),
    (("hidden_states",), "mean", True, [True]),
    (("hidden_states",), "per_token", True, [True, True]),
    (("weight",), "sum_times", True, [True]),
    (("weight",), "per_token", True, [True]),
    (("weight",), "per_token", False, [True]),
    (("weight",), "zero_for_some", False, [True]),
    (("weight",), "lse", True, [True, True]),
]


@pytest.mark.parametrize(("frozen", "kind", "same_gradient", "expected"), PASSES)
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_chunks_are_computed_again_only_where_they_must_be(
    frozen, kind, same_gradient, expected, ignored, passes
):
    inputs, labels = linear_inputs(torch.bfloat16, CPU, ignored=ignored)
    check_log_probs(
        inputs,
        labels,
        upstream=upstream_of(kind, labels),
        frozen=frozen,
        same_gradient=same_gradient,
    )
    assert [*map(bool, passes)] == expected


@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=["", "frozen head"])
@pytest.mark.parametrize("kind", ["mean", "per_token"])
def test_float16_waits_for_the_upstream_gradient(frozen, kind, passes):
    """A loss scale in it keeps small gradients."""
    inputs, labels = linear_inputs(torch.float16, CPU, 16, 20, 1021, ignored=0.0)
    inputs["hidden_states"] /= 32  # every p is about 1 / 1021
    upstream = {name: u * 4096.0 for name, u in upstream_of(kind, labels).items()}
    ours = check_log_probs(inputs, labels, upstream=upstream, frozen=frozen)
    assert [*map(bool, passes)] == [False, True]
    assert ours["hidden_states"].isfinite().all()


def test_gradients_of_ignored_tokens_may_differ_from_those_of_the_others(passes):
    """As of a mean over the supervised tokens alone."""
    inputs, labels = linear_inputs(torch.float32, CPU)
    upstream = {"log_probs": (labels != -100) / (labels != -100).sum()}
    check_log_probs(inputs, labels, upstream=upstream)
    assert [*map(bool, passes)] == [True]


WEIGHTS = torch.tensor([2.0, -0.5, 0.75, 0, -3, 1, 1.25, -1, 0, 2.5, -2, 0.1])
CLIPPED = torch.tensor([1.0] * 6 + [0.0] + [1] * 5)
RATIOS = torch.tensor([1.0] * 5 + [1.1, 0] + [1] * 3 + [-0.7, 1.0])
ONE_MORE = torch.tensor([0.0] * 3 + [0.5] + [0] * 8)  # where the weight is 0
UPSTREAMS = {  # of log-probabilities, and the rows that are computed again
    "in proportion": (WEIGHTS / -7, 0),
    "rounded otherwise": (WEIGHTS / 3 / 0.7 * 1.3, 0),
    "a factor of 0": (WEIGHTS * 0, 0),
    "clipped": (WEIGHTS * CLIPPED, 1),
    "some ratios": (WEIGHTS * RATIOS / 3, 3),
    "a weight of 0": (WEIGHTS + ONE_MORE, 1),
    "large where others are small": (torch.where(WEIGHTS == -3, 1e3, WEIGHTS), 1),
    "none of the largest": (torch.where(WEIGHTS.abs() >= 2, 0.0, WEIGHTS), 12),
    "of no proportion": (WEIGHTS.roll(1), 12),
    "nan": (torch.where(WEIGHTS == 1, math.nan, WEIGHTS), 12),
    "infinite": (torch.where(WEIGHTS == 1, -math.inf, WEIGHTS), 12),
}


@pytest.mark.parametrize(("upstream", "again"), UPSTREAMS.values(), ids=UPSTREAMS)
@pytest.mark.parametrize(
    ("options", "dtype"),
    slow_but(
        list(zip([{}, {"bias": True}, {"rank": 4}], LOW_DTYPES, strict=True)),
        list(product([{}, {"bias": True}, {"rank": 4}], LOW_DTYPES)),
    ),
    ids=str,
)
def test_rows_of_other_weights_are_computed_again(
    upstream, again, options, dtype, quick_device, passes
):
    inputs, labels = linear_inputs(dtype, quick_device, 12, ignored=0.0, **options)
    upstream, weights = (each.to(quick_device) for each in (upstream, WEIGHTS))
    how = {"row_weights": weights, "chunk_mib": chunk_mib(5, 131, dtype)}
    how |= {"softcap": 5.0, "logit_scale": 0.5, "temperature": 1.6}
    if upstream.isfinite().all():
        check_log_probs(inputs, labels, upstream={"log_probs": upstream}, outputs=(), **how)
    else:
        ours, waiting = (
            results_and_gradients(
                lambda how=how, **x: linear_log_probs(**paired(x), labels=labels, **how),
                inputs,
                {"log_probs": upstream},
            )
            for how in (how, how | {"same_gradient": False, "row_weights": None})
        )
        torch.testing.assert_close(ours, waiting, rtol=0, atol=0, equal_nan=True)
        passes[-2:] = []
    if dtype == torch.float16:
        assert [n for n in passes if n] == [12]
    else:
        assert [n for n in passes if n] == [12] + [again] * (again > 0)


@pytest.mark.parametrize("frozen", [("hidden_states",), ("bias",), ("hidden_states", "weight")])
@pytest.mark.parametrize("kind", ["in proportion", "some ratios"])
def test_weights_of_some_gradients_and_labels(frozen, kind, quick_device):
    inputs, labels = linear_inputs(torch.float32, quick_device, 12, bias=True)
    upstream = {"log_probs": UPSTREAMS[kind][0].to(quick_device)}
    weights = WEIGHTS.to(quick_device)
    ours = check_log_probs(
        inputs, labels, upstream=upstream, frozen=frozen, row_weights=weights, outputs=()
    )
    weights = torch.where(labels == -100, math.nan, weights)
    again = check_log_probs(
        inputs, labels, upstream=upstream, frozen=frozen, row_weights=weights, outputs=()
    )
    torch.testing.assert_close(ours, again, rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [0.0, math.nan, math.inf, -math.inf, 1e-40, 1e35])
@pytest.mark.parametrize("some", [False, True])
def test_weights_without_a_use_change_nothing(wrong, some, quick_device, passes):
    inputs, labels = linear_inputs(torch.bfloat16, quick_device, 12, ignored=0.0)
    weights = torch.where((WEIGHTS == 1) | (not some), wrong, WEIGHTS).to(quick_device)
    upstream = {"log_probs": WEIGHTS.to(quick_device)}
    check_log_probs(inputs, labels, upstream=upstream, outputs=(), row_weights=weights)
    assert passes == [12, 1 if some else 10]  # two upstream gradients are 0


def test_weights_may_change_before_the_backward_pass(quick_device):
    inputs, labels = linear_inputs(torch.float32, quick_device, 12)
    weights = WEIGHTS.to(quick_device)

    def gradients(change):
        leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
        of_loss = weights.clone()
        how = {"labels": labels, "row_weights": of_loss}
        loss = (linear_log_probs(**leaves, **how).log_probs * weights).sum()
        if change:
            of_loss.zero_()
        return torch.autograd.grad(loss, list(leaves.values()))

    assert all(map(torch.equal, gradients(False), gradients(True)))
