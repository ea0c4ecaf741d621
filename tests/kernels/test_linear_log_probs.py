"""Log-probabilities of labels, what is known beside them, and their gradients.

Everything is held to the rule of ``exactness``: every result and every gradient, by its name.
"""

import math

import pytest
import torch
from exactness import assert_no_worse
from kernel_forms import FORMS, form
from log_probs_ways import (
    DIFFERENTIABLE,
    FIELDS,
    check_log_probs,
    eager_log_probs,
    results_and_gradients,
)
from three_ways import LOW_DTYPES, chunk_mib, linear_inputs
from torch import Tensor
from torch.nn.functional import linear

from liger_patch.kernels import reference
from liger_patch.kernels.head import log_probs as operator
from liger_patch.kernels.head import logits as head_logits
from liger_patch.kernels.head import pytorch as pytorch_rows
from liger_patch.kernels.linear_log_probs import LogProbs, linear_log_probs

CPU = torch.device("cpu")
CASES = {  # inputs, options
    "plain": ({}, {}),
    "softcap": ({}, {"softcap": 5.0}),
    "logit_scale": ({}, {"logit_scale": 0.3}),
    "temperature": ({}, {"temperature": 0.7}),
    "softcap_temperature": ({}, {"softcap": 5.0, "logit_scale": 0.5, "temperature": 1.6}),
    "bias": ({"bias": True}, {}),
    "adapter": ({"rank": 4}, {}),
}
SHAPES = {  # N, H, V
    "aligned": (8, 64, 256),
    "unaligned": (13, 37, 131),
    "one_of_each": (1, 1, 2),
    "no_power": (9, 5, 1021),
}
UPSTREAM = {
    "mean": lambda n: {"log_probs": torch.full((n,), -1 / max(n, 1))},
    "sum": lambda n: {"log_probs": torch.ones(n)},
    "sum_times": lambda n: {"log_probs": torch.full((n,), -3.7)},
    "per_token": lambda n: {"log_probs": torch.randn(n)},
    "zero_for_some": lambda n: {"log_probs": torch.randn(n) * (torch.arange(n) % 3 > 0)},
    "entropy": lambda n: {"entropy": torch.randn(n)},
    "lse": lambda n: {"lse": torch.randn(n)},
    "all": lambda n: {name: torch.randn(n) for name in DIFFERENTIABLE},
}
FROZEN = [(), ("hidden_states",), ("weight", "bias"), ("hidden_states", "weight")]
SOME = [  # of the upstream gradients, one of entropy or lse among them
    ("entropy",),
    ("lse",),
    ("entropy", "lse"),
    ("log_probs", "entropy"),
    ("log_probs", "lse"),
    DIFFERENTIABLE,
]


@pytest.fixture(params=FORMS[::2])
def quick_device(request):
    """`device` without Triton's interpreter, for what the host does whatever the kernels."""
    return form(request)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks of a row in the Triton form, and of rows in the PyTorch form."""
    monkeypatch.setattr("liger_patch.kernels.triton.cross_entropy.MAX_BLOCK_V", 32)
    monkeypatch.setattr(pytorch_rows, "SCRATCH_BYTES", 2 * 131 * 16)


def upstream_of(kind, labels):
    return {name: u.to(labels.device) for name, u in UPSTREAM[kind](len(labels)).items()}


def leaves_of(inputs, frozen=()):
    return {k: v.detach().clone().requires_grad_(k not in frozen) for k, v in inputs.items()}


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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_every_option_in_every_dtype(case, dtype, device):
    how, options = case
    inputs, labels = linear_inputs(dtype, device, 7, **how)
    upstream, budget = upstream_of("all", labels), chunk_mib(3, 131, dtype)
    check_log_probs(inputs, labels, upstream=upstream, chunk_mib=budget, **options)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["mean", "per_token"])
def test_every_option_of_log_probs_alone(case, dtype, kind, quick_device):
    how, options = case
    inputs, labels = linear_inputs(dtype, quick_device, **how)
    budget = chunk_mib(5, 131, dtype)
    check_log_probs(
        inputs, labels, upstream=upstream_of(kind, labels), outputs=(), chunk_mib=budget, **options
    )


@pytest.mark.parametrize("names", SOME, ids=", ".join)
def test_some_of_the_upstream_gradients(names, device):
    inputs, labels = linear_inputs(torch.float32, device, 5)
    upstream = {name: torch.randn(5, device=device) for name in names}
    check_log_probs(inputs, labels, upstream=upstream, outputs=names)


@pytest.mark.parametrize("kind", UPSTREAM)
@pytest.mark.parametrize("same_gradient", [True, False])
@pytest.mark.parametrize("frozen", FROZEN, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_upstream_gradient(kind, same_gradient, frozen, dtype, quick_device):
    inputs, labels = linear_inputs(dtype, quick_device, bias=True)
    check_log_probs(
        inputs,
        labels,
        upstream=upstream_of(kind, labels),
        frozen=frozen,
        same_gradient=same_gradient,
        chunk_mib=chunk_mib(5, 131, dtype),
    )


@pytest.mark.parametrize("kind", ["mean", "per_token", "all"])
@pytest.mark.parametrize(
    "frozen",
    [
        ("weight",),
        ("hidden_states", "weight"),
        ("weight", "low_rank"),
        ("weight", "low_rank_weight"),
        ("low_rank", "low_rank_weight"),
    ],
    ids=str,
)
def test_adapter_with_any_upstream_gradient(kind, frozen, quick_device):
    inputs, labels = linear_inputs(torch.float32, quick_device, rank=3)
    check_log_probs(inputs, labels, upstream=upstream_of(kind, labels), frozen=frozen)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_shape(shape, dtype, cpu_form):
    inputs, labels = linear_inputs(dtype, cpu_form, *shape, bias=True, ignored=0.0)
    check_log_probs(inputs, labels, upstream=upstream_of("all", labels), softcap=5.0)


@pytest.mark.parametrize("rows", [1, 3, 4, 7])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_any_number_of_chunks(rows, ignored, cpu_form):
    inputs, labels = linear_inputs(torch.float32, cpu_form, 7, ignored=ignored)
    budget = chunk_mib(rows, 131, torch.float32)
    check_log_probs(inputs, labels, upstream=upstream_of("all", labels), chunk_mib=budget)


@pytest.mark.parametrize("case", ["plain", "softcap_temperature"])
@pytest.mark.parametrize("slope", [-5.0, 5.0], ids=["falling", "rising"])
def test_rows_of_many_blocks(case, slope, cpu_form, small_blocks):
    """Later blocks raise the largest logit, or do not."""
    _, options = CASES[case]
    inputs, labels = linear_inputs(torch.float32, cpu_form, 4, bias=True, ignored=0.0)
    inputs["bias"] += torch.linspace(0, slope, 131)
    check_log_probs(inputs, labels, upstream=upstream_of("all", labels), **options)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("same_gradient", [True, False])
def test_gradcheck_in_float64(case, same_gradient):
    how, options = case
    inputs, labels = linear_inputs(torch.float64, CPU, 5, 4, 11, **how)
    names, leaves = zip(*leaves_of(inputs).items(), strict=True)
    small = chunk_mib(2, 11, torch.float64)

    def results(*values):
        x = dict(zip(names, values, strict=True))
        if "low_rank" in x:
            x["low_rank"] = x["low_rank"], x.pop("low_rank_weight")
        ours = linear_log_probs(
            **x,
            labels=labels,
            outputs=DIFFERENTIABLE,
            same_gradient=same_gradient,
            chunk_mib=small,
            **options,
        )
        return tuple(getattr(ours, name) for name in DIFFERENTIABLE)

    assert torch.autograd.gradcheck(results, leaves)
    for kind in ("sum_times", "all"):
        upstream = upstream_of(kind, labels)
        check_log_probs(inputs, labels, upstream=upstream, chunk_mib=small, **options)


def test_reference_is_torch_log_softmax():
    inputs, labels = linear_inputs(torch.float64, CPU, bias=True, rank=3, ignored=0.0)
    logits = linear(inputs["hidden_states"], inputs["weight"], inputs["bias"])
    logits += inputs["low_rank"] @ inputs["low_rank_weight"].t()
    pair = inputs.pop("low_rank"), inputs.pop("low_rank_weight")
    how = {"softcap": 5.0, "logit_scale": 0.5, "temperature": 1.6}
    theirs = reference.linear_log_probs(**inputs, labels=labels, low_rank=pair, **how)
    z = 5.0 * torch.tanh(0.5 * logits / 5.0) / 1.6
    distribution = torch.distributions.Categorical(logits=z)
    probs = z.softmax(-1)
    expected = LogProbs(
        log_probs=distribution.log_prob(labels),
        entropy=distribution.entropy(),
        is_top1=probs.max(-1).indices == labels,
        lse=z.exp().sum(-1).log(),
        mean_logits=z.mean(-1),
        log_sum_sq_probs=probs.square().sum(-1).log(),
    )
    assert theirs.is_top1.any()
    assert not theirs.is_top1.all()
    torch.testing.assert_close(theirs, expected)
    half = torch.where(torch.arange(len(labels)) % 2 == 0, -1, labels)
    ignored = reference.linear_log_probs(
        **inputs, labels=half, low_rank=pair, ignore_index=-1, **how
    )
    for value, whole in zip(ignored, theirs, strict=True):
        assert torch.equal(value[1::2], whole[1::2])
        assert not value[::2].any()


def all_zero(results):
    return all(v is None or (not v.any() and v.isfinite().all()) for v in results.values())


@pytest.mark.parametrize("kind", ["mean", "per_token", "all"])
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("frozen", [(), ("weight", "bias")], ids=["", "frozen head"])
def test_all_labels_ignored_gives_zero(kind, dtype, tokens, frozen, quick_device):
    inputs, labels = linear_inputs(dtype, quick_device, tokens, bias=True, ignored=1.1)
    upstream = upstream_of(kind, labels)
    assert all_zero(check_log_probs(inputs, labels, upstream=upstream, frozen=frozen))


@pytest.mark.parametrize("tokens", [0, 5])
def test_no_supervised_token_gives_zero(tokens, device):
    inputs, labels = linear_inputs(torch.float32, device, tokens, ignored=1.1)
    assert all_zero(check_log_probs(inputs, labels, upstream=upstream_of("all", labels)))


@pytest.mark.parametrize("ignore_index", [0, 130, -1, 131])
def test_any_ignore_index_also_within_the_vocabulary(ignore_index, quick_device):
    inputs, labels = linear_inputs(torch.float32, quick_device, ignore_index=ignore_index)
    assert (labels == ignore_index).any()
    check_log_probs(inputs, labels, upstream=upstream_of("all", labels), ignore_index=ignore_index)


@pytest.mark.parametrize("frozen", [(), ("weight", "bias")], ids=["", "frozen head"])
@pytest.mark.parametrize("kind", ["sum", "all"])
def test_upstream_gradients_of_ignored_tokens_do_not_matter(kind, frozen, quick_device):
    inputs, labels = linear_inputs(torch.bfloat16, quick_device, bias=True, ignored=0.5)
    upstream = upstream_of(kind, labels)
    clean = check_log_probs(inputs, labels, upstream=upstream, frozen=frozen)
    for each in upstream.values():
        each[labels == -100] = math.nan
    results = results_and_gradients(
        lambda **x: linear_log_probs(**x, labels=labels, outputs=FIELDS), inputs, upstream, frozen
    )
    torch.testing.assert_close(results, clean, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # NumPy, of nan
@pytest.mark.parametrize(
    ("place", "value"),
    [("hidden_states", math.nan), ("hidden_states", math.inf), ("weight", math.nan)],
)
def test_nan_and_infinity_reach_what_depends_on_them(place, value, device):
    inputs, labels = linear_inputs(torch.float32, device, 5, ignored=0.0)
    inputs[place][4, 2] = value
    upstream = upstream_of("all", labels)
    results = results_and_gradients(
        lambda **x: linear_log_probs(**x, labels=labels, outputs=FIELDS), inputs, upstream
    )
    reached = torch.arange(len(labels), device=device) == 4
    if place == "weight":
        reached[:] = True
    for name in (*DIFFERENTIABLE, "log_sum_sq_probs", "dhidden_states"):
        finite = results[name].isfinite().view(len(labels), -1)
        assert not finite.any(1)[reached].any(), name
        assert finite.all(1)[~reached].all(), name
    assert not results["dweight"].isfinite().all()


def test_nan_in_an_ignored_token_reaches_nothing(quick_device):
    inputs, labels = linear_inputs(torch.float32, quick_device, bias=True, ignored=0.0)
    labels[4] = -100
    upstream = upstream_of("all", labels)
    clean = check_log_probs(inputs, labels, upstream=upstream)
    inputs["hidden_states"][4] = math.nan
    results = results_and_gradients(
        lambda **x: linear_log_probs(**x, labels=labels, outputs=FIELDS), inputs, upstream
    )
    torch.testing.assert_close(results, clean, rtol=0, atol=0)


def test_the_first_of_several_largest_is_top1(cpu_form, small_blocks):
    weight = torch.randint(-2, 3, (131, 16)).float()  # small integers: logits without rounding
    weight[[3, 7, 100]] = 3.0
    inputs = {"hidden_states": torch.ones(5, 16), "weight": weight}
    labels = torch.tensor([3, 7, 100, 50, -100])
    ours = check_log_probs(inputs, labels)
    assert ours["is_top1"].tolist() == [True, False, False, False, False]


def test_a_zero_weight_knows_nothing(device):
    """Every class is as likely as any other, and the first of them is the top."""
    inputs = {
        "hidden_states": torch.randn(3, 16, device=device),
        "weight": torch.zeros(131, 16, device=device),
    }
    labels = torch.tensor([0, 1, 130], device=device)
    ours = check_log_probs(inputs, labels, upstream=upstream_of("all", labels))
    assert ours["is_top1"].tolist() == [True, False, False]
    torch.testing.assert_close(ours["entropy"], ours["lse"])
    torch.testing.assert_close(ours["lse"], torch.full_like(ours["lse"], math.log(131)))


@pytest.mark.parametrize("kind", ["mean", "all"])
def test_label_of_probability_one_has_no_gradient_left(kind, device):
    weight = torch.zeros(131, 16, device=device)
    weight[7] = 10.0
    hidden_states = torch.full((3, 16), 2.0, device=device)  # a logit of 320, the others 0
    labels = torch.full((3,), 7, device=device)
    upstream = upstream_of(kind, labels)
    upstream.pop("lse", None)  # its own is the weight's row
    inputs = {"hidden_states": hidden_states, "weight": weight}
    ours = check_log_probs(inputs, labels, upstream=upstream)
    for name in ("log_probs", "entropy", "log_sum_sq_probs", "dhidden_states", "dweight"):
        assert not ours[name].any(), name
    assert (ours["lse"] == 320).all()


@pytest.mark.parametrize("kind", ["mean", "entropy"])
def test_what_all_logits_have_in_common_does_not_blur_the_gradients(kind, device):
    """As rounding their lse would."""
    inputs = {
        "hidden_states": torch.randint(-8, 9, (5, 16), device=device) / 8,
        "weight": torch.randint(-8, 9, (131, 16), device=device) / 8,
        "bias": torch.full((131,), 4096.0, device=device),  # logits without rounding
    }
    labels = torch.randint(131, (5,), device=device)
    check_log_probs(inputs, labels, upstream=upstream_of(kind, labels))


def test_large_logits_do_not_overflow(device):
    inputs, labels = linear_inputs(torch.float32, device, 5)
    inputs["hidden_states"] *= 1000
    ours = check_log_probs(inputs, labels, upstream=upstream_of("all", labels))
    assert all(value.isfinite().all() for value in ours.values())
    assert ours["log_probs"].min() < -1000


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


def test_second_backward_pass_needs_retain_graph():
    inputs, labels = linear_inputs(torch.float32, CPU)
    log_probs = linear_log_probs(**leaves_of(inputs), labels=labels).log_probs
    log_probs.mean().backward()
    with pytest.raises(RuntimeError, match="second time"):
        log_probs.mean().backward()


def test_gradients_that_come_late_are_not_those_of_a_changed_weight():
    inputs, labels = linear_inputs(torch.float32, CPU)
    leaves = leaves_of(inputs)
    log_probs = linear_log_probs(**leaves, labels=labels).log_probs
    with torch.no_grad():
        leaves["weight"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.backward(torch.randn(len(labels)))


@pytest.mark.parametrize("frozen", [(), ("weight",)], ids=["", "frozen head"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_derivative_is_refused(name, frozen):
    inputs, labels = linear_inputs(torch.float32, CPU)
    leaves = leaves_of(inputs, frozen)
    result = getattr(linear_log_probs(**leaves, labels=labels, outputs=name), name)
    with pytest.raises(RuntimeError, match="linear_log_probs has no second derivative"):
        torch.autograd.grad(result.sum(), leaves["hidden_states"], create_graph=True)


@pytest.mark.parametrize("ignored", [0.0, 0.3])
@pytest.mark.parametrize("changed", DIFFERENTIABLE)
def test_results_may_be_changed_in_place(changed, ignored, quick_device):
    inputs, labels = linear_inputs(torch.float32, quick_device, ignored=ignored)
    upstream = upstream_of("all", labels)
    how = {"labels": labels, "outputs": DIFFERENTIABLE}
    untouched = results_and_gradients(lambda **x: linear_log_probs(**x, **how), inputs, upstream)

    def in_place(**x):
        results = linear_log_probs(**x, **how)
        getattr(results, changed).mul_(2.0)
        return results

    halved = upstream | {changed: upstream[changed] / 2}
    results = results_and_gradients(in_place, inputs, halved)
    for name in ("dhidden_states", "dweight"):
        assert torch.equal(results[name], untouched[name])


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


@pytest.mark.parametrize(
    ("outputs", "given"),
    [
        ("entropy", ["entropy"]),
        (["lse", "is_top1"], ["lse", "is_top1"]),
        (("mean_logits",), ["mean_logits"]),
        ({"log_probs"}, []),
        ("log_sum_sq_probs", ["log_sum_sq_probs"]),
        ((), []),
        (FIELDS, FIELDS),
    ],
    ids=str,
)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_outputs_are_those_asked_for(outputs, given, softcap, quick_device):
    inputs, labels = linear_inputs(torch.float32, quick_device, 5)
    results = linear_log_probs(**inputs, labels=labels, outputs=outputs, softcap=softcap)
    computed = {name for name, value in results._asdict().items() if value is not None}
    assert computed == {"log_probs", *given}
    everything = linear_log_probs(**inputs, labels=labels, outputs=FIELDS, softcap=softcap)
    for value, expected in zip(results, everything, strict=True):
        assert value is None or torch.equal(value, expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_mean_of_logits_a_slab_at_a_time(case, ignored):
    how, options = case
    for dtype in LOW_DTYPES:
        inputs, labels = linear_inputs(dtype, CPU, 2 * operator.SLAB, ignored=ignored, **how)
        assert (labels != -100).sum() > operator.SLAB
        check_log_probs(inputs, labels, outputs="mean_logits", **options)


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


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_twice_the_same_bits(dtype, quick_device):
    inputs, labels = linear_inputs(dtype, quick_device, bias=True)
    how = {"upstream": upstream_of("all", labels), "chunk_mib": chunk_mib(5, 131, dtype)}
    first, second = (check_log_probs(inputs, labels, **how) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


class InParts:
    """A weight as a quantised one is read."""

    requires_grad = False
    row_multiple = 16

    def __init__(self, weight: Tensor) -> None:
        self.stored = weight
        self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.largest = 0

    def rows(self, start: int, stop: int) -> Tensor:
        self.largest = max(self.largest, stop - start)
        return self.stored[start:stop].clone()

    def is_current(self) -> bool:
        return True


@pytest.mark.parametrize("kind", ["mean", "per_token", "all"])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_weight_in_parts_is_as_exact(kind, rank, dtype, quick_device, monkeypatch):
    monkeypatch.setattr(head_logits, "SLICE_BYTES", 40 * 40 * dtype.itemsize)
    inputs, labels = linear_inputs(dtype, quick_device, rank=rank)
    in_parts = InParts(inputs["weight"])
    monkeypatch.setattr(
        "log_probs_ways.linear_log_probs",
        lambda weight, **how: linear_log_probs(weight=in_parts, **how),
    )
    check_log_probs(
        inputs,
        labels,
        upstream=upstream_of(kind, labels),
        frozen=("weight",),
        chunk_mib=chunk_mib(5, 131, dtype),
    )
    assert in_parts.largest == 32  # the whole multiples in the slice's bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["mean", "all"])
def test_autocast_is_that_of_linear(dtype, kind):
    inputs, labels = linear_inputs(torch.float32, CPU, bias=True)
    inputs["weight"] = inputs["weight"].to(torch.bfloat16)
    upstream = upstream_of(kind, labels)

    def under_autocast(function, x):
        with torch.autocast("cpu", dtype):
            return function(**x)

    def ours(**x):
        return linear_log_probs(**x, labels=labels, outputs=FIELDS)

    our = results_and_gradients(lambda **x: under_autocast(ours, x), inputs, upstream)
    eager = results_and_gradients(
        lambda hidden_states, weight, bias: eager_log_probs(
            under_autocast(linear, {"input": hidden_states, "weight": weight, "bias": bias}), labels
        ),
        inputs,
        upstream,
    )
    exact = results_and_gradients(
        lambda **x: reference.linear_log_probs(**x, labels=labels),
        {name: value.double() for name, value in inputs.items()},
        upstream,
    )
    assert [our[f"d{name}"].dtype for name in inputs] == [v.dtype for v in inputs.values()]
    assert {our[name].dtype for name in FIELDS} == {torch.float32, torch.bool}
    ways = [{n: v for n, v in way.items() if n != "is_top1"} for way in (our, eager, exact)]
    assert_no_worse(*ways, dtype)


N, H, V = 4, 3, 8
META = torch.device("meta")
WRONG = [  # argument, value, what the message must hold beside its name
    ("temperature", 0, "0"),
    ("temperature", 0.0, "0.0"),
    ("temperature", -0.5, "-0.5"),
    ("temperature", math.inf, "inf"),
    ("temperature", math.nan, "nan"),
    ("temperature", "1", "'1'"),
    ("temperature", None, "None"),
    ("temperature", torch.tensor(1.0), "tensor(1.)"),
    ("outputs", "entropies", "'entropies'"),
    ("outputs", ("entropy", "loss"), "'loss'"),
    ("outputs", [1], "[1]"),
    ("outputs", None, "None"),
    ("outputs", 5, "5"),
    ("softcap", 0.0, "0.0"),
    ("softcap", "30", "'30'"),
    ("softcap", math.nan, "nan"),
    ("logit_scale", math.inf, "inf"),
    ("logit_scale", None, "None"),
    ("ignore_index", "-100", "'-100'"),
    ("chunk_mib", 0, "0"),
    ("chunk_mib", "64", "'64'"),
    ("hidden_states", torch.ones(N), "(4,)"),
    ("hidden_states", torch.ones(2, N, H), "(2, 4, 3)"),
    ("hidden_states", torch.ones(N, H, dtype=torch.int64), "torch.int64"),
    ("hidden_states", None, "NoneType"),
    ("weight", torch.ones(V, H + 1), "(8, 4)"),
    ("weight", torch.ones(0, H), "(0, 3)"),
    ("weight", torch.ones(V, H, device=META), "meta"),
    ("weight", torch.ones(V, H, dtype=torch.float64), "torch.float64"),
    ("weight", [[1.0]], "list"),
    ("bias", torch.ones(V - 1), "(7,)"),
    ("low_rank", torch.ones(N, 2), "tensor"),
    ("low_rank", (torch.ones(N - 1, 2), torch.ones(V, 2)), "(3, 2)"),
    ("labels", torch.zeros(N - 1, dtype=torch.int64), "(3,)"),
    ("labels", torch.zeros(N), "torch.float32"),
    ("labels", torch.zeros(N, dtype=torch.int64, device=META), "meta"),
    ("labels", torch.tensor([0, V, 1, 2]), "got 8 (1 outside)"),
    ("labels", torch.tensor([0, -1, 1, 2]), "got -1 (1 outside)"),
]


@pytest.mark.parametrize(
    ("argument", "value", "shown"), [pytest.param(*row, id=f"{row[0]}-{row[2]}") for row in WRONG]
)
def test_what_does_not_fit_is_named(argument, value, shown):
    fitting = {
        "hidden_states": torch.ones(N, H),
        "weight": torch.ones(V, H),
        "labels": torch.zeros(N, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=argument) as error:
        linear_log_probs(**(fitting | {argument: value}))
    assert shown in str(error.value)
