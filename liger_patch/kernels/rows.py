"""Rows (..., H) in the order in which they lie in memory, so that a transposed view (attention
heads in front of tokens) needs no copy.
"""

import math

import torch
from torch import Tensor


def rows_of(tensor: Tensor) -> Tensor:
    """Return (..., H) as (N, H), also where H is 0."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def contiguous_features(tensor: Tensor) -> Tensor:
    """Return the tensor, copied where its last dimension has another stride than 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor, copied unless it is contiguous; or None if there is none."""
    return None if tensor is None else tensor.contiguous()


def empty_in_order(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return dense memory for a result of the tensor's shape, rows in the tensor's order;
    contiguous where the tensor's last dimension is not. Strides of dimensions of size 1 say
    nothing.
    """
    if tensor.is_contiguous() or tensor.stride(-1) != 1:
        return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
    like = torch.empty_like(tensor, dtype=dtype)
    if like.stride() == tensor.stride():
        return like
    # torch.preserve_format takes rows apart where another dimension has a stride of 1 too
    strides, step = [1] * tensor.dim(), tensor.shape[-1]
    for d in sorted(reversed(range(tensor.dim() - 1)), key=tensor.stride):
        strides[d], step = step, step * tensor.shape[d]
    # no view: what an autograd function returns is not to be written to where it is one
    return tensor.new_empty_strided(tensor.shape, strides, dtype=dtype)


def in_order_of(result: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor in the order in memory of a dense result of its shape."""
    if tensor.stride() == result.stride():
        return tensor
    sizes = zip(tensor.shape, tensor.stride(), result.stride(), strict=True)
    if all(size == 1 or ours == theirs for size, ours, theirs in sizes):
        return tensor
    return torch.empty_like(result, dtype=tensor.dtype).copy_(tensor)
