"""Rotary embeddings: results and every gradient against float64, no worse than what the models
compute in the same dtype, at positions in any order.
"""

from __future__ import annotations

import pytest
import torch
from eager_layers import rotated, rotated_beside, tables
from layer_checks import check
from slow_cases import pairwise, slow_but
from three_ways import DTYPES
from torch import Tensor

from liger_patch.kernels.rotary import rotary


def rotated_to_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As DeepSeek V3's models do it: neighbours become halves."""
    turned, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    cos, sin, first, second = cos[:, None], sin[:, None], turned[..., ::2], turned[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


FORMS = {  # what the models compute, and the operator's options
    "halves": (rotated, {}),
    "pairs": (rotated_beside, {"interleaved": True}),
    "pairs that become halves": (rotated_to_halves, {"interleaved": True, "grouped": True}),
}


@pytest.mark.parametrize(
    ("form", "kind", "turned", "dtype"),
    pairwise(
        FORMS,
        ["packed", "any order", "shared", "of no pair"],
        [16, 10],  # of 16 features
        DTYPES,
    ),
)
def test_rotary(form, kind, turned, dtype, device):
    eager, options = FORMS[form]
    # tokens in front of heads, as products give them, behind features that others turn; 9 heads
    # are more than a program holds
    inputs = {"q": torch.randn(2, 5, 9, 20), "k": torch.randn(2, 5, 3, 20)}
    inputs = {name: value.to(device, dtype) for name, value in inputs.items()}
    if kind == "of no pair":  # the halves of cos and sin differ
        cos, sin = torch.randn(2, 2, 5, turned)
    else:
        cos, sin = tables((2, 5, turned), kind)
    cos, sin = cos.to(device, dtype), sin.to(device, dtype)
    if options:  # one of two angles, in memory beside others
        cos, sin = cos[..., : turned // 2], torch.stack((sin, sin), -1)[..., : turned // 2, 0]

    def turn(function, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return function(*(x.transpose(1, 2)[..., 4:] for x in (q, k)))

    check(
        lambda q, k: turn(lambda q, k: rotary(q, k, cos, sin, **options), q, k),
        lambda q, k: turn(
            lambda *both: tuple(eager(x, cos.to(x.dtype), sin.to(x.dtype)) for x in both), q, k
        ),
        inputs,
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", slow_but([DTYPES[0], DTYPES[-1]], DTYPES), ids=str)
def test_rotary_without_keys(interleaved, dtype, device):
    q = torch.randn(2, 5, 3, 8, device=device, dtype=dtype)
    cos, sin = (t.to(device, dtype) for t in tables((2, 5, 8), "any order"))
    if interleaved:
        cos, sin = cos[..., :4], sin[..., :4]
    eager = rotated_beside if interleaved else rotated
    check(
        lambda q: rotary(q.transpose(1, 2), None, cos, sin, interleaved=interleaved)[0],
        lambda q: eager(q.transpose(1, 2), cos.to(q.dtype), sin.to(q.dtype)),
        {"q": q},
    )
    assert rotary(q, None, cos[:, :3], sin[:, :3], interleaved=interleaved)[1].shape == (2, 0, 3, 8)


def test_rotary_of_wider_tables_has_their_dtype(device):
    q = torch.randn(1, 4, 6, 8, device=device, dtype=torch.bfloat16)
    cos, sin = (each.to(device) for each in tables((1, 6, 8), "shared"))
    check(
        lambda q: rotary(q, q, cos, sin)[0],
        lambda q: rotated(q, cos.to(torch.promote_types(q.dtype, torch.float32)), sin),
        {"q": q},
    )


def test_rotary_of_float64_tables_is_computed_in_float64(device):
    q = torch.randn(1, 4, 6, 8, device=device)
    cos, sin = (each.to(device, torch.float64) for each in tables((1, 6, 8), "shared"))
    result = rotary(q, q, cos, sin)[0]
    torch.testing.assert_close(result, rotated(q.double(), cos, sin))
    assert result.dtype == torch.float64


def test_rotary_of_no_token(device):
    empty = torch.randn(2, 3, 0, 8, device=device)
    assert rotary(empty, empty, *torch.randn(2, 1, 0, 8, device=device))[0].shape == empty.shape
