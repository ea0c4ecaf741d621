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
    ("row_weights", torch.ones(N - 1), "(3,)"),
    ("row_weights", torch.ones(N, 1), "(4, 1)"),
    ("row_weights", torch.ones(N, device=META), "meta"),
    ("row_weights", torch.ones(N, dtype=torch.complex64), "torch.complex64"),
    ("row_weights", torch.ones(N, requires_grad=True), "gradient"),
    ("row_weights", 1.0, "float"),
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
