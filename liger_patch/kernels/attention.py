"""PyTorch's flash attention of rows that ``segments`` describes, and what is merged with it.

With its result O and its log-sum-exp of scores, lse, of a query and a head:

- a sink, one more logit for each head, in the softmax of every query, that no value belongs to
  (gpt-oss; arXiv:2309.17453):

      O' = O sigmoid(lse - sink)        lse' = log(exp(lse) + exp(sink))
      dsink = - sum over queries of exp(sink - lse') (dO' . O')

- a prefix that several sequences continue, of which their queries see all keys. With O and lse over
  each of the two sets of keys:

      lse' = log(exp(lse1) + exp(lse2))    O' = exp(lse1 - lse') O1 + exp(lse2 - lse') O2

The probabilities over all are exp(score - lse'), so flash attention's own backward pass over each
set of keys, given O' and lse', returns its part of the gradients. Parts are added.

H: heads, T: tokens, D: features of a head. Kept for the backward pass: queries, keys, values, O'
and lse', as flash attention keeps them. No key is copied, and no tensor of (T, T) is made. Flash
attention: Dao, "FlashAttention-2" (arXiv:2307.08691).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import LAYER_ADVICE, check_backward
from liger_patch.kernels.segments import Segments

MOST_NUMBERS = 2**31  # of queries: with more, PyTorch 2.11's flash attention gave wrong gradients


def may_serve_flash_attention(device: torch.device, dtype: torch.dtype | None) -> bool:
    """Return whether PyTorch's flash attention serves any tensors of this dtype on this device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return dtype in (torch.bfloat16, torch.float16)


@functools.cache
def has_lse_of_tokens() -> bool:
    """Return whether flash attention's log-sum-exp of several sequences is of their tokens,
    (num_heads, T). torch 2.6 pads each sequence.
    """
    states = torch.empty(2, 1, 8, device="meta")
    ends = torch.empty(2, device="meta", dtype=torch.int32)
    how = flash_options(Segments(ends, 2, None), None)
    return flash_forward(states, states, states, how)[1].dim() == 2


def serves_flash_attention(
    query: Tensor,  # (B, num_heads, T, D)
    key: Tensor,  # (B, num_key_value_heads, T, D)
    value: Tensor,  # (B, num_key_value_heads, T, D)
) -> bool:
    """Return whether PyTorch's flash attention is on, and serves these: their dtype and sizes, on
    this GPU.
    """
    if not query.is_cuda or torch.version.hip is not None:
        return False
    if query.shape[-1] % 8:  # SDPA would pad them
        return False
    if query.numel() > MOST_NUMBERS:
        return False
    cuda = torch.backends.cuda
    is_grouped = query.shape[1] != key.shape[1]
    parameters = cuda.SDPAParams(query, key, value, None, 0.0, True, is_grouped)
    return cuda.can_use_flash_attention(parameters)


def segment_attention(
    query: Tensor,  # (B, num_heads, T, D)
    key: Tensor,  # (B, num_key_value_heads, T, D)
    value: Tensor,  # (B, num_key_value_heads, T, D)
    segments: Segments,
    scale: float | None = None,
) -> Tensor:
    """Return the attention (B, T, num_heads, D) of each query to the keys of its segment, without
    those of a prefix.

    Args:
        scale: factor on the products of queries and keys; None for 1 / sqrt(D).
    """
    states, shape = flash_states(query, key, value, segments)
    return flash_forward(*states, flash_options(segments, scale))[0].view(shape)


def flash_states(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments
) -> tuple[tuple[Tensor, Tensor, Tensor], torch.Size]:
    """Return states (B, heads, T, D) as flash attention takes them, and the shape of its result."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    shape = query.shape
    if segments.cu_seqlens is not None:
        query, key, value = (each.flatten(0, 1) for each in (query, key, value))
    return (query, key, value), shape


def flash_options(segments: Segments, scale: float | None) -> dict[str, Any]:
    """Return the arguments that keep flash attention within segments."""
    cu_seqlens, max_seqlen, window, *_ = segments
    return {
        "cu_seqlens": (cu_seqlens, cu_seqlens),  # of queries, of keys
        "lengths": (max_seqlen, max_seqlen),
        "is_causal": window is None,
        "options": {
            "scale": scale,
            "window_size_left": None if window is None else window - 1,
            "window_size_right": None if window is None else 0,
        },
    }


def flash_forward(
    query: Tensor,  # (B, T, num_heads, D); with several sequences (B T, num_heads, D)
    key: Tensor,
    value: Tensor,
    how: dict[str, Any],
) -> tuple[Tensor, ...]:
    """Return the result, the log-sum-exp of scores (B, num_heads, T) or (num_heads, B T), seed and
    offset.
    """
    # the public varlen_attn came with torch 2.10, and takes more of the host's time
    return torch.ops.aten._flash_attention_forward(
        query, key, value, *how["cu_seqlens"], *how["lengths"], 0.0, how["is_causal"], False,
        **how["options"],
    )[:4]  # fmt: skip


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
    """Return the gradients of query, key and value. If y and lse are those of more keys, these
    keys' part of them.
    """
    return torch.ops.aten._flash_attention_backward(
        dy, query, key, value, y, lse, *how["cu_seqlens"], *how["lengths"], 0.0,
        how["is_causal"], seed, offset, **how["options"],
    )  # fmt: skip


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
    """Return the gradient of sinks (H,); y and lse are the results of ``add_sinks``."""
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
