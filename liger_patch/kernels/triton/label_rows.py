"""Triton form of the labels' own part of the gradient of a head's weight:

    dweight[y] += sum over tokens with label y of g * x

in float32, rounded once, in the order of the tokens: no atomics. n: tokens, H: hidden size, V:
vocabulary. Extra memory: the tokens' order by label, 20 bytes each.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.triton.launch import launch

# a block of columns takes all warps: shared between two rows of tokens, it is four times slower
BLOCKS: dict[str, Any] = {"BLOCK_TOKENS": 8, "BLOCK_H": 1024}
WARPS = 4


@triton.jit(do_not_specialize=["tokens"])
def _add_label_rows_kernel(
    labels_ptr,  # (n,) sorted
    order_ptr,  # (n,) tokens in this order
    label_gradients_ptr,  # (n,) of the tokens
    x_ptr,  # (N, H)
    x_stride,
    rows_ptr,  # (n,) of x for each token; None: the same
    dweight_ptr,  # (V, H)
    dweight_stride,
    tokens,
    hidden_size,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program per token and block of columns: the first of a label's tokens adds them all."""
    place = tl.program_id(0)
    label = tl.load(labels_ptr + place)
    if tl.load(labels_ptr + place - 1, mask=place > 0, other=-1) == label:
        return
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_column = column < hidden_size
    dweight_ptr += label.to(tl.int64) * dweight_stride + column
    # loads that wait for no other come first: what costs here is waiting in turn
    total = tl.load(dweight_ptr, mask=is_column, other=0.0).to(tl.float32)
    found = tl.full((), BLOCK_TOKENS, dtype=tl.int32)
    while found == BLOCK_TOKENS:
        places = place + tl.arange(0, BLOCK_TOKENS)
        inside = places < tokens
        token = tl.load(order_ptr + places, mask=inside, other=0)
        is_same = inside & (tl.load(labels_ptr + places, mask=inside, other=-1) == label)
        gradient = tl.load(label_gradients_ptr + token, mask=is_same, other=0.0)
        row = token
        if rows_ptr is not None:
            row = tl.load(rows_ptr + token, mask=is_same, other=0)
        offsets = row[:, None] * x_stride + column[None, :]
        x = tl.load(x_ptr + offsets, mask=is_same[:, None] & is_column[None, :], other=0.0)
        total += tl.sum(gradient[:, None] * x.to(tl.float32), axis=0)
        found = tl.sum(is_same.to(tl.int32), axis=0)
        place += BLOCK_TOKENS
    tl.store(dweight_ptr, total, mask=is_column)


def add_label_rows_(
    dweight: Tensor,  # (V, H)
    x: Tensor,  # (N, H)
    rows: Tensor | None,  # (n,) of x for each token; None: the same
    labels: Tensor,  # (n,)
    label_gradients: Tensor,  # (n,) float32
) -> None:
    """Add ``label_gradients[:, None] * x[rows]`` to ``dweight[labels]``; labels may repeat."""
    ordered, order = torch.sort(labels.to(torch.int32), stable=True)
    hidden_size = x.shape[1]
    launch(
        _add_label_rows_kernel,
        (len(labels), triton.cdiv(hidden_size, BLOCKS["BLOCK_H"])),
        ordered,
        order,
        label_gradients,
        x,
        x.stride(0),
        rows,
        dweight,
        dweight.stride(0),
        len(labels),
        hidden_size,
        **BLOCKS,
        num_warps=WARPS,
    )
