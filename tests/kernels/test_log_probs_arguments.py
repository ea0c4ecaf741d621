"""Arguments of ``linear_log_probs``: which results it gives, and errors that name what is wrong."""

import math

import pytest
import torch
from log_probs_ways import FIELDS
from three_ways import linear_inputs

from liger_patch.kernels.linear_log_probs import linear_log_probs


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


N, H, V = 4, 3, 8
META = torch.device("meta")
WRONG = [  # argument, value, what the message must hold beside its name; others: test_arguments
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
    ("row_weights", torch.ones(N - 1), "(3,)"),
    ("row_weights", torch.ones(N, 1), "(4, 1)"),
    ("row_weights", torch.ones(N, device=META), "meta"),
    ("row_weights", torch.ones(N, dtype=torch.complex64), "torch.complex64"),
    ("row_weights", torch.ones(N, requires_grad=True), "gradient"),
    ("row_weights", 1.0, "float"),
    ("softcap", 0.0, "0.0"),
    ("weight", torch.ones(V, H + 1), "(8, 4)"),
    ("labels", torch.tensor([0, V, 1, 2]), "got 8 (1 outside)"),
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
