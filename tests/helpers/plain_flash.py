"""Flash attention's forward and backward pass over packed sequences, by their formulas, in any
dtype and on any device: what ``attention.flash_forward`` and ``flash_backward`` call PyTorch for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.autocast("cpu", enabled=False)
def flash_forward(query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> tuple:
    """Return the result (T, H, D), the log-sum-exp (H, T), and no seed and offset."""
    scores, key, value = _scores(query, key, value, how)
    lse = scores.logsumexp(-1)
    y = (scores - lse[..., None]).exp() @ value.transpose(0, 1)
    return y.transpose(0, 1).to(query.dtype).contiguous(), lse, lse.new_zeros(()), lse.new_zeros(())


def flash_backward(
    dy: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    y: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    how: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    scores, keys, values = _scores(query, key, value, how)
    scale, rows = _scale(query, how), dy.to(lse.dtype).transpose(0, 1)  # (H, T, D)
    shares = (scores - lse[..., None]).exp()
    rest = (rows * y.transpose(0, 1)).sum(-1, keepdim=True)
    dscores = shares * (rows @ values.permute(1, 2, 0) - rest) * scale
    dquery = dscores @ keys.transpose(0, 1)
    dkey = dscores.transpose(1, 2) @ query.to(lse.dtype).transpose(0, 1)
    dvalue = shares.transpose(1, 2) @ rows
    found = dquery.transpose(0, 1), _of_groups(dkey, key), _of_groups(dvalue, value)
    return found[0].to(query.dtype), found[1].to(key.dtype), found[2].to(value.dtype)


def _scores(
    query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores (H, queries, keys) of what queries see, and keys and values of all H heads."""
    assert how["options"].get("window_size_left") is None
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = query.shape[1] // key.shape[1]
    key, value = (each.to(wide).repeat_interleave(groups, 1) for each in (key, value))
    places = [torch.arange(len(each), device=each.device) for each in (query, key)]
    sequences = [
        torch.searchsorted(ends.long(), place, right=True)
        for ends, place in zip(how["cu_seqlens"], places, strict=True)
    ]
    for ends, longest in zip(how["cu_seqlens"], how["lengths"], strict=True):
        assert ends.dtype == torch.int32
        assert int(ends.diff().min()) > 0  # no empty sequence
        assert int(ends.diff().max()) == longest
    assert [int(ends[-1]) for ends in how["cu_seqlens"]] == [len(query), len(key)]
    sees = sequences[0][:, None] == sequences[1]
    if how["is_causal"]:
        sees &= places[0][:, None] >= places[1]
    scores = query.to(wide).transpose(0, 1) @ key.permute(1, 2, 0) * _scale(query, how)
    return scores.masked_fill(~sees, float("-inf")), key, value


def _scale(query: Tensor, how: dict[str, Any]) -> float:
    scale = how["options"]["scale"]
    return query.shape[-1] ** -0.5 if scale is None else scale


def _of_groups(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum gradients (H, T, D) over the heads that share a key."""
    heads, tokens, size = like.shape[1], *gradient.shape[1:]
    return gradient.view(heads, -1, tokens, size).sum(1).transpose(0, 1)
