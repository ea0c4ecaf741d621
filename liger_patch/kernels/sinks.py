"""Attention with a sink: one more logit for each head, in the softmax of every query, that no value
belongs to (gpt-oss; arXiv:2309.17453).

With flash attention's result O and its log-sum-exp of scores, lse, of a query and a head:

    O' = O sigmoid(lse - sink)        lse' = log(exp(lse) + exp(sink))

The probabilities that include the sink are exp(score - lse'), so flash attention's own backward
pass, given O' and lse', returns the gradients of queries, keys and values. And

    dsink = - sum over queries of exp(sink - lse') (dO' . O')

H: heads, T: tokens, D: features of a head. Kept for the backward pass: queries, keys, values, O'
and lse', as flash attention keeps them. No tensor of (T, T) is made.
"""

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


def add_sinks(y: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return what attention gives with sinks (..., H, D), and its log-sum-exp (..., H).

    Args:
        y, lse: of the attention without sinks, (..., H, D) and (..., H).
        sinks: (H,).
    """
    sinks = sinks.to(lse.dtype)
    share = torch.sigmoid(lse - sinks)
    return (y * share[..., None]).to(y.dtype), torch.logaddexp(lse, sinks)


def gradient_of_sinks(dy: Tensor, y: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks (H,), of what ``add_sinks`` returned and the gradient of y."""
    of_y = (dy.to(lse.dtype) * y).sum(-1)
    share = torch.exp(sinks.to(lse.dtype) - lse)
    return -(share * of_y).sum(tuple(range(lse.dim() - 1))).to(sinks.dtype)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        query: Tensor,  # (B, T, H, D); with several sequences (B T, H, D)
        key: Tensor,
        value: Tensor,
        sinks: Tensor,  # (H,)
        segments: Segments,
        scale: float | None,
    ) -> Tensor:
        how = flash_options(segments, scale)
        y, lse, seed, offset = flash_forward(query, key, value, how)
        y, lse_of_tokens = add_sinks(y, lse.transpose(-1, -2), sinks)
        lse = lse_of_tokens.transpose(-1, -2).contiguous()  # (B, H, T), or (H, B T)
        ctx.how = how
        ctx.save_for_backward(query, key, value, sinks, y, lse, seed, offset)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        check_backward("sink_attention", dy, advice=LAYER_ADVICE)
        query, key, value, sinks, y, lse, seed, offset = ctx.saved_tensors
        dy = dy.contiguous()
        dsinks = None
        if ctx.needs_input_grad[3]:
            dsinks = gradient_of_sinks(dy, y, lse.transpose(-1, -2), sinks)
        gradients = flash_backward(dy, query, key, value, y, lse, seed, offset, ctx.how)
        return *gradients, dsinks, None, None


def sink_attention(
    query: Tensor,  # (B, num_heads, T, D)
    key: Tensor,  # (B, num_key_value_heads, T, D)
    value: Tensor,  # (B, num_key_value_heads, T, D)
    sinks: Tensor,  # (num_heads,)
    segments: Segments,
    scale: float | None = None,
) -> Tensor:
    """Return the attention with sinks (B, T, num_heads, D) of each query to the keys of its
    segment.

    Args:
        scale: factor on the products of queries and keys; None for 1 / sqrt(D).
    """
    states, shape = flash_states(query, key, value, segments)
    return _SinkAttention.apply(*states, sinks, segments, scale).view(shape)
