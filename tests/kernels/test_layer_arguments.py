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
from liger_patch.kernels.experts import Activation, ExpertProjection, experts
from liger_patch.kernels.gated import gated
from liger_patch.kernels.gated_mlp import gated_mlp
from liger_patch.kernels.gated_norm import gated_norm
from liger_patch.kernels.lora.linears import lora_linears
from liger_patch.kernels.lora.projection import LoraProjection
from liger_patch.kernels.rms_norm import rms_norm
from liger_patch.kernels.rotary import rotary

X, Q, COS = zeros(2, 8), zeros(2, 3, 5, 8), zeros(1, 5, 8)
ROWS, TAPS = zeros(2, 3, 8), zeros(8, 4)
HEADS, V, G = zeros(2, 3, 2, 8), zeros(2, 3, 4, 6), zeros(2, 3, 4)
GATE, DOWN = zeros(6, 8), zeros(8, 6)
PART = LoraProjection(GATE, zeros(6), zeros(4, 8), zeros(6, 4), 1.0)
SMALL = PART._replace(weight=zeros(5, 8), bias=None, b=zeros(5, 4))
LORA_DOWN = LoraProjection(DOWN, None, zeros(3, 6), zeros(8, 3), 1.0)
HALF_DOWN = LoraProjection(DOWN[:, :3], None, zeros(3, 3), zeros(8, 3), 1.0)
FIRST = ExpertProjection(zeros(4, 8, 12), None, zeros(4, 2, 8), zeros(4, 12, 2))
LAST = ExpertProjection(zeros(4, 6, 8), zeros(4, 8))
FITTING: dict[Callable[..., Any], dict[str, Any]] = {
    causal_conv: {"x": ROWS, "weight": TAPS},
    experts: {
        **{"x": X, "index": zeros(2, 3, dtype=torch.long), "weights": zeros(2, 3)},
        **{"first": FIRST, "last": LAST},
    },
    gated: {"gate": X, "up": X},
    gated_delta_rule: {"q": HEADS, "k": HEADS, "v": V, "g": G, "beta": G},
    gated_mlp: {"x": X, "gate": GATE, "up": GATE, "down": DOWN},
    gated_norm: {"x": X, "gate": X, "weight": X[0], "eps": 1e-5},
    lora_linears: {"x": X, "projections": (PART, PART)},
    rms_norm: {"x": X, "weight": None, "eps": 1e-5},
    rotary: {"q": Q, "k": Q, "cos": COS, "sin": COS},
}


def second(**fields: Any) -> dict[str, Any]:
    return {"projections": (PART, PART._replace(**fields))}


def lora(gate: Any = PART, up: Any = PART, down: Any = LORA_DOWN) -> dict[str, Any]:
    return {"gate": gate, "up": up, "down": down}


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
    experts: [
        ({"activation": Activation("relu")}, r"^activation\.name must be .*'clamped'.* got 'relu'"),
        ({"x": X.long()}, r"^x must be floating point \(N, H\), got torch.int64 \(2, 8\)"),
        (
            {"index": zeros(1, 3, dtype=torch.long)},
            r"^index must be \(2, K\) integers, got torch.int64 \(1, 3\)",
        ),
        ({"weights": zeros(2, 2)}, r"^weights must be \(2, 3\), got \(2, 2\)"),
        ({"x": X[:, :7]}, r"^first\.weight must be \(4, 7, 12\), got \(4, 8, 12\)"),
        (
            {"last": LAST._replace(weight=zeros(8))},
            r"^last\.weight must be \(E, in, out\), got \(8,\)",
        ),
        ({"first": FIRST._replace(a=zeros(8))}, r"^first\.a must be \(4, 0, 8\), got \(8,\)"),
        ({"first": FIRST._replace(a=None)}, r"^first\.a and first\.b must both be given, or none"),
        (
            {"first": FIRST._replace(b=zeros(4, 12, 3))},
            r"^first\.b must be \(4, 12, 2\), got \(4, 12, 3\)",
        ),
        ({"last": LAST._replace(bias=zeros(8))}, r"^last\.bias must be \(4, 8\), got \(8,\)"),
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
    gated_mlp: [
        ({"activation": "relu"}, "activation must be one of"),
        ({"x": X[:, :7]}, r"gate.weight must have shape \(O, 7\)"),
        ({"gate": GATE[:5], "up": None, "down": DOWN[:, :2]}, r"must be \(2 I, H\), got 5 rows"),
        ({"up": GATE[:5]}, "up.weight must have 6 rows .* got 5"),
        ({"down": DOWN[:, :3]}, r"down.weight must have shape \(O, 6\), got"),
        ({"up": None}, r"down.weight must have shape \(O, 3\), got"),
        ({"gate": PART}, "must all have adapters, or none of them"),
        ({"gate": PART, "up": None, "down": HALF_DOWN}, "must all have adapters, or none"),
        (lora() | {"activation": "relu"}, "activation must be one of .* got 'relu'"),
        (lora(up=SMALL), r"up.weight must have 6 rows .* got 5"),
        (lora(SMALL, SMALL), r"^down\.weight must have shape \(O, 5\), got \(8, 6\)"),
        (
            lora(down=LORA_DOWN._replace(b=zeros(8, 3).double())),
            r"^down\.b must be torch.float32 as x is, outside autocast, got torch.float64",
        ),
        *(
            (how | {"slice_tokens": number}, f"slice_tokens must be .* > 0 or None, got {number!r}")
            for how in ({}, lora())
            for number in (0, -1, 1.5, True, "8")
        ),
    ],
    gated_norm: [
        ({"activation": "relu"}, "activation must be one of"),
        ({"x": X.int()}, "x must be floating point"),
        ({"gate": X[:1]}, r"gate must be floating point \(2, 8\), got .* \(1, 8\)"),
        ({"weight": X[0, :4]}, r"weight must be floating point \(8,\), got .* \(4,\)"),
        ({"gate": X.to("meta")}, "gate must be on cpu as x is, got meta"),
        ({"group_size": 3}, "group_size must be a divisor of H = 8, got 3"),
        ({"group_size": 0}, "group_size must be a divisor of H = 8, got 0"),
        ({"dtype": torch.int8}, "dtype must be floating point or None"),
        ({"eps": -1.0}, "eps must be a number >= 0, got -1.0"),
    ],
    lora_linears: [
        ({"x": X.long()}, r"x must be floating point \(..., H\), got torch.int64 \(2, 8\)"),
        ({"x": X[0, 0]}, r"x must be floating point \(..., H\), got torch.float32 \(\)"),
        ({"x": X[:, :7]}, r"projections\[0\].weight must have shape \(O, 7\), got \(6, 8\)"),
        (second(weight=zeros(6, 9)), r"\[1\].weight must have shape \(O, 8\), got \(6, 9\)"),
        (second(bias=zeros(5)), r"\[1\].bias must have shape \(6,\), got \(5,\)"),
        (second(a=zeros(4, 7)), r"\[1\].a must have shape \(4, 8\), got \(4, 7\)"),
        (second(b=zeros(6, 3)), r"\[1\].b must have shape \(6, 4\), got \(6, 3\)"),
        (second(b=zeros(6, 4).to("meta")), r"\[1\].b must be on cpu as x is, got meta"),
        (
            second(a=zeros(4, 8).half()),
            r"\[1\].a must be torch.float32 as x is, outside autocast, got torch.float16",
        ),
        (second(dropout=1.0), r"\[1\].dropout must be in \[0, 1\), got 1.0"),
        (second(dropout=-0.1), r"\[1\].dropout must be in \[0, 1\), got -0.1"),
        (second(dropout=torch.nan), r"\[1\].dropout must be in \[0, 1\), got nan"),
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
