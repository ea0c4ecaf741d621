"""The backward pass of log-probabilities: where chunks are computed again, with the same bits, and
what it refuses.
"""

import pytest
import torch
from log_probs_ways import (
    DIFFERENTIABLE,
    FIELDS,
    UPSTREAM,
    check_log_probs,
    leaves_of,
    results_and_gradients,
    upstream_of,
)
from three_ways import LOW_DTYPES, chunk_mib, linear_inputs

from liger_patch.kernels.head import losses as operator
from liger_patch.kernels.linear_log_probs import linear_log_probs

CPU = torch.device("cpu")


@pytest.fixture
def passes(monkeypatch):
    """Whether each pass through the chunks has computed gradients."""
    seen = []
    run_chunks = operator.run_chunks

    def counted(config, inputs, row_scale, wanted, **how):
        seen.append(any(wanted))
        return run_chunks(config, inputs, row_scale, wanted, **how)

    monkeypatch.setattr(operator, "run_chunks", counted)
    return seen


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
    assert passes == expected


@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=["", "frozen head"])
@pytest.mark.parametrize("kind", ["mean", "per_token"])
def test_float16_waits_for_the_upstream_gradient(frozen, kind, passes):
    """A loss scale in it keeps small gradients."""
    inputs, labels = linear_inputs(torch.float16, CPU, 16, 20, 1021, ignored=0.0)
    inputs["hidden_states"] /= 32  # every p is about 1 / 1021
    upstream = {name: u * 4096.0 for name, u in upstream_of(kind, labels).items()}
    ours = check_log_probs(inputs, labels, upstream=upstream, frozen=frozen)
    assert passes == [False, True]
    assert ours["dhidden_states"].isfinite().all()


def test_gradients_of_ignored_tokens_may_differ_from_those_of_the_others(passes):
    """As of a mean over the supervised tokens alone."""
    inputs, labels = linear_inputs(torch.float32, CPU)
    upstream = {"log_probs": (labels != -100) / (labels != -100).sum()}
    check_log_probs(inputs, labels, upstream=upstream)
    assert passes == [True]


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "nothing wants gradients"])
@pytest.mark.parametrize("same_gradient", [True, False])
def test_results_without_gradients(mode, same_gradient, quick_device, passes):
    inputs, labels = linear_inputs(torch.bfloat16, quick_device)
    expected = check_log_probs(inputs, labels, same_gradient=same_gradient)
    if mode == "nothing wants gradients":
        leaves, context = inputs, torch.enable_grad()
    else:
        leaves, context = leaves_of(inputs), getattr(torch, mode)()
    passes.clear()
    with context:
        results = linear_log_probs(
            **leaves, labels=labels, outputs=FIELDS, same_gradient=same_gradient
        )
    assert passes == [False]
    for name, value in results._asdict().items():
        assert not value.requires_grad
        assert torch.equal(value, expected[name])


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["per_token", "all"])
@pytest.mark.parametrize("frozen", [(), ("hidden_states",)], ids=str)
def test_a_wrong_guess_gives_the_same_bits(dtype, kind, frozen, quick_device):
    inputs, labels = linear_inputs(dtype, quick_device, bias=True)
    upstream, budget = upstream_of(kind, labels), chunk_mib(5, 131, dtype)
    guessed, waited = (
        results_and_gradients(
            lambda guess=guess, **x: linear_log_probs(
                **x, labels=labels, outputs=FIELDS, same_gradient=guess, chunk_mib=budget
            ),
            inputs,
            upstream,
            frozen,
        )
        for guess in (True, False)
    )
    torch.testing.assert_close(guessed, waited, rtol=0, atol=0)


@pytest.mark.parametrize("kind", UPSTREAM)
@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=["", "frozen head"])
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_second_backward_pass_gives_the_same_bits(kind, frozen, dtype, quick_device):
    """The first scales gradients of the forward pass, or computes them as the second does; powers
    of two round nothing.
    """
    inputs, labels = linear_inputs(dtype, quick_device, 8, ignored=0.0)
    leaves = leaves_of(inputs, frozen)
    results = linear_log_probs(**leaves, labels=labels, outputs=DIFFERENTIABLE)
    upstream = {
        name: torch.where(u == 0, u, torch.exp2(u.abs().log2().round()).copysign(u))
        for name, u in upstream_of(kind, labels).items()
    }
    named = [getattr(results, name) for name in upstream]
    trained = [leaf for leaf in leaves.values() if leaf.requires_grad]
    first, second, third = (
        torch.autograd.grad(named, trained, list(upstream.values()), retain_graph=True)
        for _ in range(3)
    )
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, third))
