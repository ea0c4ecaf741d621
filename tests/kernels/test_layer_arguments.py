"""Arguments of layers' operators that do not fit: ValueError that names the argument and its value.
Those of the losses are in ``test_arguments``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import zeros

from liger_patch.kernels.causal_conv import causal_conv
from liger_patch.kernels.delta_rule import gated_delta_rule
from liger_patch.kernels.gated import gated
from liger_patch.kernels.rms_norm import rms_norm
from liger_patch.kernels.rotary import rotary

X, Q, COS = zeros(2, 8), zeros(2, 3, 5, 8), zeros(1, 5, 8)
ROWS, TAPS = zeros(2, 3, 8), zeros(8, 4)
HEADS, V, G = zeros(2, 3, 2, 8), zeros(2, 3, 4, 6), zeros(2, 3, 4)
FITTING: dict[Callable[..., Any], dict[str, Any]] = {
    causal_conv: {"x": ROWS, "weight": TAPS},
    gated: {"gate": X, "up": X},
    gated_delta_rule: {"q": HEADS, "k": HEADS, "v": V, "g": G, "beta": G},
    rms_norm: {"x": X, "weight": None, "eps": 1e-5},
    rotary: {"q": Q, "k": Q, "cos": COS, "sin": COS},
}


WRONG: dict[Callable[..., Any], list[tuple[dict[str, Any], str]]] = {
    causal_conv: [
        ({"activation": "relu"}, "activation must be one of .* got 'relu'"),
        ({"x": ROWS.int()}, r"x must be floating point \(B, T, C\), got torch.int32"),
        ({"weight": TAPS[:4]}, r"weight must be floating point \(8, 4\), got .* \(4, 4\)"),
        ({"bias": TAPS}, r"bias must be floating point \(8,\), got .* \(8, 4\)"),
        ({"weight": TAPS.to("meta")}, "weight must be on cpu as x is, got meta"),
        (
            {"sequence_ids": zeros(2, 4, dtype=torch.int)},
            r"sequence_ids must be integers \(2, 3\), got torch.int32 \(2, 4\)",
        ),
    ],
    gated: [
        ({"activation": "relu"}, "activation must be one of"),
        ({"gate": X.long()}, "gate must be floating point"),
        ({"gate": X[:, :7], "up": None}, r"gate without up must be \(..., 2 I\), got \(2, 7\)"),
        ({"up": X[:1]}, r"up must have the shape of gate, \(2, 8\), got \(1, 8\)"),
    ],
    gated_delta_rule: [
        ({"q": HEADS.int()}, "q must be floating point .* got torch.int32"),
        ({"k": HEADS[:1]}, r"k must be floating point \(2, 3, 2, 8\), got .*\(1, 3, 2, 8\)"),
        ({"v": V[:, :2]}, r"v must be floating point \(2, 3, 4, 6\), got .*2, 2, 4, 6"),
        (
            {"v": V[:, :, :3], "g": G[..., :3], "beta": G[..., :3]},
            "a multiple of q's 2 heads, got 3",
        ),
        ({"g": G[..., :2]}, r"g must be floating point \(2, 3, 4\), got .*2, 3, 2"),
        ({"beta": G.bool()}, "beta must be floating point .* got torch.bool"),
        ({"g": G.to("meta")}, "g must be on cpu as q is, got meta"),
        (
            {"sequence_ids": zeros(3, dtype=torch.int)},
            r"sequence_ids must be integers \(2, 3\), got torch.int32 \(3,\)",
        ),
    ],
    rms_norm: [
        ({"x": X.long()}, "x must be floating point"),
        ({"dtype": torch.int32}, "dtype .* got torch.int32"),
        ({"weight": X[0, :3]}, r"weight must have shape \(8,\), got \(3,\)"),
        ({"weight": X[0].to("meta")}, "weight must be on cpu"),
        ({"eps": -1.0}, "eps must be a number >= 0, got -1.0"),
        ({"offset": None}, "offset must be a number, got None"),
    ],
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
}


@pytest.mark.parametrize(
    ("operator", "changes", "message"),
    [
        pytest.param(operator, *row, id=f"{operator.__name__}-{'-'.join(row[0])}")
        for operator, rows in WRONG.items()
        for row in rows
    ],
)
def test_what_does_not_fit_is_an_error_that_names_it(
    operator: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        operator(**FITTING[operator] | changes)
