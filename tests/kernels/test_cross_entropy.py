"""Cross entropy of ready-made logits: every option, dtype and reduction, no worse than eager."""

import pytest
import torch
from three_ways import DTYPES, LOW_DTYPES, OPTIONS, check_logits, filled, logits_inputs

from liger_patch.kernels.cross_entropy import cross_entropy

MANY_BLOCKS_V = 9001  # more than one block of the Triton form


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_option_in_every_dtype(options, dtype, device):
    logits, labels = logits_inputs(dtype, device)
    check_logits(logits, labels, **filled(options, *logits.shape, device))


@pytest.mark.parametrize("vocab_size", [1, 2, 32, 128, 1021, 8192, MANY_BLOCKS_V])
def test_any_vocabulary(vocab_size, device):
    logits, labels = logits_inputs(torch.bfloat16, device, 5, vocab_size)
    check_logits(logits, labels, **filled(OPTIONS["everything"], *logits.shape, device))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("slope", [0.0, 5.0], ids=["", "rising"])
def test_every_option_over_many_blocks(options, slope, cpu_form):
    logits, labels = logits_inputs(torch.float32, cpu_form, 4, MANY_BLOCKS_V, ignored=0.0)
    logits += torch.linspace(0, slope, MANY_BLOCKS_V, device=cpu_form)  # later blocks raise the max
    check_logits(logits, labels, **filled(options, *logits.shape, cpu_form))


@pytest.mark.parametrize("options", ["plain", "z_loss", "logit_scale"])
@pytest.mark.parametrize("hidden_columns", [5, 8192, 8500])  # within, exactly and beyond a block
def test_minus_infinity_logits_have_no_share(options, hidden_columns, device):
    logits, labels = logits_inputs(torch.bfloat16, device, 4, MANY_BLOCKS_V, ignored=0.0)
    logits[:, :hidden_columns] = -torch.inf
    labels = labels.clamp_min(hidden_columns)
    ours = check_logits(logits, labels, **OPTIONS[options])
    assert not ours["logits"][:, :hidden_columns].any()


@pytest.mark.parametrize("options", ["softcap", "everything"])
def test_minus_infinity_logits_meet_the_softcap(options, device):
    logits, labels = logits_inputs(torch.float32, device, 4, ignored=0.0)
    logits[:, ::2] = -torch.inf
    check_logits(logits, labels, **filled(OPTIONS[options], *logits.shape, device))


@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("options", ["plain", "softcap", "label_smoothing"])
def test_large_logits_do_not_overflow(dtype, options, device):
    logits, labels = logits_inputs(dtype, device)
    check_logits(logits / logits.abs().max() * 1e4, labels, **OPTIONS[options])


def test_label_of_probability_one_has_no_gradient_left(device):
    logits = torch.zeros(3, 131, device=device)
    logits[:, 7] = 200.0
    ours = check_logits(logits, torch.full((3,), 7, device=device))
    assert ours["loss"] == 0
    assert not ours["logits"].any()


def test_options_may_be_integers(device):
    logits, labels = logits_inputs(torch.float32, device, ignore_index=1)
    check_logits(logits, labels, softcap=1, logit_scale=1, label_smoothing=1, z_loss=1)
    check_logits(logits, labels, softcap=3, logit_scale=2, label_smoothing=0, z_loss=0)
    check_logits(logits, labels, softcap=3, logit_scale=-2, ignore_index=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_ready_made_logits_alone(dtype):
    """Sums of 32,000 of them are infinite in float16."""
    logits, labels = 6 * torch.randn(4, 32000), torch.randint(32000, (4,))
    expected = cross_entropy(logits, labels, label_smoothing=0.1)
    with torch.autocast("cpu", dtype):
        loss = cross_entropy(logits, labels, label_smoothing=0.1)
    assert torch.equal(loss, expected)
