"""Log-probabilities where tokens are ignored, and where logits are extreme, tied or not finite."""

import math

import pytest
import torch
from log_probs_ways import CASES, DIFFERENTIABLE, FIELDS, check_log_probs, upstream_of
from three_ways import linear_inputs, results_and_gradients

from liger_patch.kernels.head import row_sums
from liger_patch.kernels.linear_log_probs import linear_log_probs


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks of a row in the Triton form, and of rows in the PyTorch form."""
    monkeypatch.setattr("liger_patch.kernels.triton.cross_entropy.MAX_BLOCK_V", 32)
    monkeypatch.setattr(row_sums, "SCRATCH_BYTES", 2 * 131 * 16)


@pytest.mark.parametrize("case", ["plain", "softcap_temperature"])
@pytest.mark.parametrize("slope", [-5.0, 5.0], ids=["falling", "rising"])
def test_rows_of_many_blocks(case, slope, cpu_form, small_blocks):
    """Later blocks raise the largest logit, or do not."""
    _, options = CASES[case]
    inputs, labels = linear_inputs(torch.float32, cpu_form, 4, bias=True, ignored=0.0)
    inputs["bias"] += torch.linspace(0, slope, 131)
    check_log_probs(inputs, labels, upstream=upstream_of("all", labels), **options)


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
    for name in (*DIFFERENTIABLE, "log_sum_sq_probs", "hidden_states"):
        finite = results[name].isfinite().view(len(labels), -1)
        assert not finite.any(1)[reached].any(), name
        assert finite.all(1)[~reached].all(), name
    assert not results["weight"].isfinite().all()


def test_the_first_of_several_largest_is_top1(cpu_form, small_blocks):
    weight = torch.randint(-2, 3, (131, 16)).float()  # small integers: logits without rounding
    weight[[3, 7, 100]] = 3.0
    inputs = {"hidden_states": torch.ones(5, 16), "weight": weight}
    labels = torch.tensor([3, 7, 100, 50, -100])
    ours = check_log_probs(inputs, labels)
    assert ours["is_top1"].tolist() == [True, False, False, False, False]


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
    for name in ("log_probs", "entropy", "log_sum_sq_probs", "hidden_states", "weight"):
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
