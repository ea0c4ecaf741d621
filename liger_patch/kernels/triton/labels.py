"""Triton forms of what a head's labels need.

Supervised tokens first: one launch where PyTorch's operations take twenty. And the labels' own part
of the gradient of a head's weight,

    dweight[y] += sum over tokens with label y of g * x

in float32, rounded once, in the order of the tokens: no atomics.

N: tokens, n: supervised tokens, H: hidden size, V: vocabulary. Extra memory of the second: the
tokens' order by label, 20 bytes each.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.triton.launch import launch

ORDER_BLOCK = 2048  # tokens at a time, for one program: 8192 take it 22 us on an H200
ORDER_WARPS = 8
# a block of columns takes all warps: shared between two rows of tokens, it is four times slower
BLOCKS: dict[str, Any] = {"BLOCK_TOKENS": 8, "BLOCK_H": 1024}
WARPS = 4


@triton.jit
def _order_tokens_kernel(
    given_ptr,  # (N,) any integers
    labels_ptr,  # (N,) int64
    rows_ptr,  # (N,) int64
    means_ptr,  # (N,) float32
    counts_ptr,  # (2,) int64
    tokens,
    vocab_size,
    ignore_index,
    BLOCK: tl.constexpr,
):
    """One program: labels and positions of the supervised tokens to the front, in their order, and
    zeros behind them.
    """
    count = tl.zeros((), dtype=tl.int64)
    n_outside = tl.zeros((), dtype=tl.int64)
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < tokens
        label = tl.load(given_ptr + token, mask=inside, other=0).to(tl.int64)
        is_supervised = inside & (label != ignore_index)
        outside = is_supervised & ((label < 0) | (label >= vocab_size))
        ones = is_supervised.to(tl.int64)
        place = count + tl.cumsum(ones, axis=0) - 1
        tl.store(labels_ptr + place, label, mask=is_supervised)
        tl.store(rows_ptr + place, token.to(tl.int64), mask=is_supervised)
        count += tl.sum(ones, axis=0)
        n_outside += tl.sum(outside.to(tl.int64), axis=0)
    tl.store(counts_ptr, count)
    tl.store(counts_ptr + 1, n_outside)
    mean = tl.div_rn(1.0, tl.maximum(count, 1).to(tl.float32))
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < tokens
        is_behind = inside & (token >= count)
        tl.store(labels_ptr + token, 0, mask=is_behind)
        tl.store(rows_ptr + token, 0, mask=is_behind)
        tl.store(means_ptr + token, mean, mask=inside)


def order_tokens(
    labels: Tensor,  # (N,)
    vocab_size: int,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return labels (N,) and rows (N,), the supervised ones first and zeros after them, counts
    (2,): supervised tokens, and those of them with a label outside [0, V), and means (N,) float32:
    for each token one over the number of supervised ones, 1 for none.
    """
    tokens, device = len(labels), labels.device
    ordered = torch.empty(tokens, dtype=torch.int64, device=device)
    rows = torch.empty_like(ordered)
    means = torch.empty(tokens, dtype=torch.float32, device=device)
    counts = torch.empty(2, dtype=torch.int64, device=device)
    launch(
        _order_tokens_kernel,
        (1,),
        labels.contiguous(),
        ordered,
        rows,
        means,
        counts,
        tokens,
        vocab_size,
        ignore_index,
        BLOCK=ORDER_BLOCK,
        num_warps=ORDER_WARPS,
    )
    return ordered, rows, counts, means


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
