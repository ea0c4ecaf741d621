"""Attention of sequences that continue a prefix which several of them share.

A query of such a sequence sees its own sequence up to itself, and all of its group's prefix. With
flash attention's results O and log-sum-exps of scores lse over each of these two sets of keys:

    lse' = log(exp(lse1) + exp(lse2))    O' = exp(lse1 - lse') O1 + exp(lse2 - lse') O2

The probabilities over both are exp(score - lse'), so flash attention's own backward pass over each
set, given O' and lse', returns its part of the gradients (as for ``sinks``). Parts are added.

H: heads, T: tokens, D: features of a head. Kept for the backward pass: queries, keys, values, O'
and lse', as flash attention keeps them. No key is copied, and no tensor of (T, T) is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from liger_patch.kernels.backend import LAYER_ADVICE, check_backward
from liger_patch.kernels.segments import (
    Segments,
    flash_backward,
    flash_forward,
    flash_options,
    flash_states,
)


class _PrefixAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        query: Tensor,  # (T, H, D)
        key: Tensor,
        value: Tensor,
        segments: Segments,
        scale: float | None,
    ) -> Tensor:
        prefixes = segments.prefixes
        assert prefixes is not None
        within = flash_options(segments, scale)
        to_prefix = {
            "cu_seqlens": prefixes.cu_seqlens,
            "lengths": prefixes.lengths,
            "is_causal": False,
            "options": {"scale": scale},
        }
        shared = slice(prefixes.tokens)  # tokens of prefixes, and of what continues them
        rest = slice(prefixes.tokens, prefixes.tokens + prefixes.continued)
        y, lse, seed, offset = flash_forward(query, key, value, within)
        y2, lse2, *_ = flash_forward(query[rest], key[shared], value[shared], to_prefix)
        share = torch.sigmoid(lse2 - lse[:, rest]).T[..., None]  # of the prefix
        y[rest] = y[rest] * (1 - share) + y2 * share
        lse[:, rest] = torch.logaddexp(lse[:, rest], lse2)
        ctx.how = within, to_prefix, shared, rest
        ctx.save_for_backward(query, key, value, y, lse, seed, offset)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        check_backward("prefix_attention", dy, advice=LAYER_ADVICE)
        query, key, value, y, lse, seed, offset = ctx.saved_tensors
        within, to_prefix, shared, rest = ctx.how
        dy = dy.contiguous()
        gradients = flash_backward(dy, query, key, value, y, lse, seed, offset, within)
        states = query[rest], key[shared], value[shared]
        merged = y[rest], lse[:, rest].contiguous()
        parts = flash_backward(dy[rest], *states, *merged, seed, offset, to_prefix)
        for gradient, part, where in zip(gradients, parts, (rest, shared, shared), strict=True):
            gradient[where] += part
        return *gradients, None, None


def prefix_attention(
    query: Tensor,  # (1, num_heads, T, D)
    key: Tensor,  # (1, num_key_value_heads, T, D)
    value: Tensor,  # (1, num_key_value_heads, T, D)
    segments: Segments,
    scale: float | None = None,
) -> Tensor:
    """Return the attention (1, T, num_heads, D) of each query to the keys of its segment, and of
    the prefix that its segment continues.

    Args:
        segments: with prefixes, and without a window.
        scale: factor on the products of queries and keys; None for 1 / sqrt(D).
    """
    states, shape = flash_states(query, key, value, segments)
    return _PrefixAttention.apply(*states, segments, scale).view(shape)
