"""Log-probabilities of labels, what is known beside them, and their gradients.

Everything is held to the rule of ``exactness``: every result and every gradient, by its name.
"""

import pytest
import torch
import truths
from log_probs_ways import CASES, FIELDS, UPSTREAM, check_log_probs, upstream_of
from slow_cases import each_pair
from three_ways import DTYPES, LOW_DTYPES, chunk_mib, linear_inputs
from torch.nn.functional import linear

from liger_patch.kernels import linear_log_probs as operator
from liger_patch.kernels.linear_log_probs import LogProbs

CPU = torch.device("cpu")
SHAPES = {  # N, H, V
    "aligned": (8, 64, 256),
    "unaligned": (13, 37, 131),
    "one_of_each": (1, 1, 2),
    "no_power": (9, 5, 1021),
}
FROZEN = [(), ("hidden_states",), ("weight", "bias"), ("hidden_states", "weight")]


@each_pair(
    case=CASES.values(),
    dtype=DTYPES,
    asked=[("all", FIELDS), ("sum_times", FIELDS), ("mean", ()), ("per_token", ())],
)
def test_every_option_in_every_dtype(case, dtype, asked, device):
    """Of all results, and of log-probabilities alone."""
    (how, options), (kind, outputs) = case, asked
    inputs, labels = linear_inputs(dtype, device, 7, **how)
    upstream, budget = upstream_of(kind, labels), chunk_mib(3, 131, dtype)
    check_log_probs(inputs, labels, upstream=upstream, outputs=outputs, chunk_mib=budget, **options)


@each_pair(
    kind=UPSTREAM, same_gradient=[True, False], frozen=FROZEN, dtype=[torch.bfloat16, torch.float32]
)
def test_any_upstream_gradient(kind, same_gradient, frozen, dtype, device):
    """Of the results that have one."""
    inputs, labels = linear_inputs(dtype, device, bias=True)
    upstream = upstream_of(kind, labels)
    how = {"same_gradient": same_gradient, "chunk_mib": chunk_mib(5, 131, dtype)}
    check_log_probs(
        inputs, labels, upstream=upstream, frozen=frozen, outputs=tuple(upstream), **how
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_shape(shape, dtype, cpu_form):
    inputs, labels = linear_inputs(dtype, cpu_form, *shape, bias=True, ignored=0.0)
    check_log_probs(inputs, labels, upstream=upstream_of("all", labels), softcap=5.0)


def test_reference_is_torch_log_softmax():
    inputs, labels = linear_inputs(torch.float64, CPU, bias=True, rank=3, ignored=0.0)
    logits = linear(inputs["hidden_states"], inputs["weight"], inputs["bias"])
    logits += inputs["low_rank"] @ inputs["low_rank_weight"].t()
    pair = inputs.pop("low_rank"), inputs.pop("low_rank_weight")
    how = {"softcap": 5.0, "logit_scale": 0.5, "temperature": 1.6}
    theirs = truths.linear_log_probs(**inputs, labels=labels, low_rank=pair, **how)
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
    ignored = truths.linear_log_probs(**inputs, labels=half, low_rank=pair, ignore_index=-1, **how)
    for value, whole in zip(ignored, theirs, strict=True):
        assert torch.equal(value[1::2], whole[1::2])
        assert not value[::2].any()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_mean_of_logits_a_slab_at_a_time(case, ignored, monkeypatch):
    monkeypatch.setattr(operator, "SLAB", 64)
    how, options = case
    for dtype in LOW_DTYPES:
        inputs, labels = linear_inputs(dtype, CPU, 2 * operator.SLAB, ignored=ignored, **how)
        assert (labels != -100).sum() > operator.SLAB
        check_log_probs(inputs, labels, outputs="mean_logits", **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["mean", "all"])
def test_autocast_is_that_of_linear(dtype, kind):
    inputs, labels = linear_inputs(torch.float32, CPU, bias=True)
    inputs["weight"] = inputs["weight"].to(torch.bfloat16)
    check_log_probs(inputs, labels, upstream=upstream_of(kind, labels), autocast=dtype)


@pytest.mark.parametrize(
    "outputs", ["entropy", ["lse", "is_top1"], {"log_probs"}, "log_sum_sq_probs", ()], ids=str
)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_outputs_are_those_asked_for(outputs, softcap, quick_device):
    inputs, labels = linear_inputs(torch.float32, quick_device, 12)
    check_log_probs(inputs, labels, outputs=outputs, softcap=softcap)
