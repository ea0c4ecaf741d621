"""Let long rows attend within blocks of tokens, where whole attention would take minutes.

Imports PyTorch alone: a process installs it before it imports libraries that keep a reference to
PyTorch's attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 8192  # tokens
# of the queries of one call, as in liger_patch's ``segments``, which is not to be imported here.
# With more, the backward pass of PyTorch 2.11's flash attention gives wrong gradients of queries
# and keys on an H200 (flash-attention's pull request 2260 mends one such overflow of 32 bits)
MOST_NUMBERS = 2**31


def install(longest_whole: int, block: int = BLOCK) -> None:
    """Replace ``scaled_dot_product_attention``: causal rows of more than ``longest_whole`` tokens,
    a multiple of ``block``, attend within their blocks.

    Blocks become sequences of a batch: a view, where a token's heads lie side by side as they do
    behind a projection, else a copy. What attention keeps and allocates for a row is as much as
    before, but where it takes more than one call.
    """
    whole = torch.nn.functional.scaled_dot_product_attention

    def within_blocks(
        query: Tensor,  # (B, num_heads, T, D)
        key: Tensor,
        value: Tensor,
        dropout_p: float,
        options: dict[str, Any],
    ) -> Tensor:
        """Return (B, T, num_heads, D)."""
        parts = (_blocks(each, block) for each in (query, key, value))
        y = whole(*parts, None, dropout_p, True, **options)
        return y.transpose(1, 2).reshape(len(query), -1, y.shape[1], y.shape[3])

    def attention(
        query: Tensor,  # (B, num_heads, T, D)
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        tokens = query.shape[-2]
        is_long = tokens > longest_whole and tokens % block == 0
        if not is_long or attn_mask is not None or not is_causal or key.shape[-2] != tokens:
            return whole(query, key, value, attn_mask, dropout_p, is_causal, **options)
        step = block * max(1, MOST_NUMBERS // (block * (query.numel() // tokens)))
        # not slices: in the backward pass each would make a gradient of the whole tensor
        split = (each.split(step, 2) for each in (query, key, value))
        parts = [within_blocks(*each, dropout_p, options) for each in zip(*split, strict=True)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).transpose(1, 2)

    torch.nn.functional.scaled_dot_product_attention = attention


def _blocks(x: Tensor, block: int) -> Tensor:
    """Return (B, num_heads, T, D) as (B T / block, num_heads, block, D)."""
    _, num_heads, _, features = x.shape
    return x.transpose(1, 2).reshape(-1, block, num_heads, features).transpose(1, 2)
