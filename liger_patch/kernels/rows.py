"""Tensors of any strides as rows (R, H), in the order of one of them in memory: heads in front of
tokens, a transposed view, need no copy.
"""

import torch
from torch import Tensor


def empty_in_order(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a result of the tensor's shape: rows in its order where they are dense in it."""
    order = memory_order(tensor) if tensor.stride(-1) == 1 else None
    if order is None:
        return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
    # torch.preserve_format takes rows apart where another dimension has a stride of 1 too
    empty = tensor.new_empty([tensor.shape[d] for d in order], dtype=dtype)
    return empty.permute([order.index(d) for d in range(len(order))])


def memory_order(tensor: Tensor) -> list[int] | None:
    """The dimensions but the last, from the largest stride to the smallest, then the last; None for
    a contiguous tensor: as they are.
    """
    if tensor.is_contiguous():
        return None
    leading = sorted(range(tensor.dim() - 1), key=lambda d: -tensor.stride(d))
    return [*leading, tensor.dim() - 1]


def in_rows(tensor: Tensor, order: list[int] | None) -> Tensor:
    """(R, H) contiguous: a view where the tensor is dense in this order, else a copy."""
    if order is None:
        return tensor.contiguous().view(-1, tensor.shape[-1])
    return tensor.permute(order).reshape(-1, tensor.shape[-1]).contiguous()
