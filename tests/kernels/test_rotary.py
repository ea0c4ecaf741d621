"""Rotary embeddings: results and every gradient against float64, no worse than what the models
compute in the same dtype, at positions in any order.
"""

import torch
from eager_layers import rotated, rotated_beside, tables
from layer_checks import check
from slow_cases import each_pair
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


@each_pair(
    form=FORMS,
    given=[("qk", 16), ("qk", 10), ("q", 10)],  # of 16 features
    kind=["packed", "any order", "shared", "of no pair"],
    dtype=DTYPES,
)
def test_rotary(form, given, kind, dtype, device):
    (eager, options), (names, turned) = FORMS[form], given
    # tokens in front of heads, as products give them, behind features that others turn; 9 heads
    # are more than a program holds
    inputs = {"q": torch.randn(2, 5, 9, 20), "k": torch.randn(2, 5, 3, 20)}
    inputs = {name: inputs[name].to(device, dtype) for name in names}
    if kind == "of no pair":  # the halves of cos and sin differ
        cos, sin = torch.randn(2, 2, 5, turned)
    else:
        cos, sin = tables((2, 5, turned), kind)
    cos, sin = cos.to(device, dtype), sin.to(device, dtype)
    if options:  # one of two angles, in memory beside others
        cos, sin = cos[..., : turned // 2], torch.stack((sin, sin), -1)[..., : turned // 2, 0]

    def heads(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.transpose(1, 2)[..., 4:]

    def ours(q: Tensor, k: Tensor | None = None) -> tuple[Tensor, ...]:
        return rotary(heads(q), heads(k), cos, sin, **options)[: len(inputs)]

    def plain(**given: Tensor) -> tuple[Tensor, ...]:
        return tuple(eager(heads(x), cos.to(x.dtype), sin.to(x.dtype)) for x in given.values())

    check(ours, plain, inputs)


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


def test_rotary_of_no_token_or_key(device):
    empty = torch.randn(2, 3, 0, 8, device=device)
    assert rotary(empty, empty, *torch.randn(2, 1, 0, 8, device=device))[0].shape == empty.shape
    q, angles = torch.randn(2, 5, 3, 8, device=device), torch.randn(2, 2, 3, 8, device=device)
    assert rotary(q, None, *angles)[1].shape == (2, 0, 3, 8)
