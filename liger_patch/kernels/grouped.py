"""Products of rows that are sorted by group with one matrix a group: of slots by their expert.

N: tokens, K: experts of a token, S = N K slots, E: experts. PyTorch's ``grouped_mm`` computes them
in bf16 from compute capability 9 on, and the host reads no counts. Elsewhere it reads them, and
multiplies group by group.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from liger_patch.kernels.backend import serves_triton_device

GROUPED_MM: Any = getattr(functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
GROUPED_DTYPES = (torch.bfloat16,)  # others PyTorch multiplies in a loop of its own
ALIGNMENT = 8  # numbers of 16 bits in the 16 bytes that grouped products read


class Order(NamedTuple):
    """The order of slots by expert.

    Attributes:
        index: (N, K), the experts of each token, which biases need alone.
        offsets: (E,) int32, where the slots of each expert end.
        slots: (S,) int32, the place of each sorted slot in ``index``.
        places: (N, K) int32, the place of each slot among the sorted ones.
        numbers: (E + 2 S,), of which these three are parts.
    """

    index: Any
    offsets: Tensor
    slots: Tensor
    places: Tensor
    numbers: Tensor

    def tokens(self) -> Tensor:
        """Return the token of each sorted slot (S,)."""
        return torch.div(self.slots, self.places.shape[1], rounding_mode="floor")


def order_from(numbers: Tensor, shape: Sequence[int], index: Tensor | None) -> Order:
    """Return the order that ``numbers`` hold, of slots (N, K)."""
    count = math.prod(shape)
    offsets, slots, places = numbers.split((len(numbers) - 2 * count, count, count))
    return Order(index, offsets, slots, places.view(shape), numbers)


def order_of(index: Tensor, experts: int) -> Order:
    """Return the order of slots by the experts of each token, index (N, K)."""
    index, count = index.long().contiguous(), index.numel()
    numbers = torch.empty(experts + 2 * count, dtype=torch.int32, device=index.device)
    order = order_from(numbers, index.shape, index)
    if count and serves_triton_device(index):
        from liger_patch.kernels.triton import expert_rows

        expert_rows.order_slots(index, order.offsets, order.slots, order.places)
    elif has_values(index):
        by_expert, slots = torch.sort(index.view(-1), stable=True)
        each = torch.arange(experts, device=index.device)
        order.offsets.copy_(torch.searchsorted(by_expert, each, right=True))
        order.slots.copy_(slots)
        order.places.view(-1)[slots] = torch.arange(count, device=index.device).int()
    return order


def grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return the product of each expert's rows with its weight.

    Args:
        x: (S, in), rows sorted by expert, contiguous.
        weight: (E, in, out).
        offsets: (E,) int32, where each expert's rows end.

    Returns:
        (S, out).
    """
    if _is_grouped(x, weight):
        return GROUPED_MM(x, weight, offs=offsets)
    y = x.new_empty(len(x), weight.shape[2])
    for expert, (start, stop) in _groups(offsets):
        torch.mm(x[start:stop], weight[expert], out=y[start:stop])
    return y


def grouped_outer(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Return the product of two matrices' rows, (S, in) and (S, out), for each expert: (E, in,
    out). It is zero for an expert without rows.
    """
    if _is_grouped(x, y):
        return GROUPED_MM(x.t(), y, offs=offsets)
    sums = x.new_zeros(len(offsets), x.shape[1], y.shape[1])
    for expert, (start, stop) in _groups(offsets):
        torch.mm(x[start:stop].t(), y[start:stop], out=sums[expert])
    return sums


def _is_grouped(x: Tensor, y: Tensor) -> bool:
    """Return whether PyTorch has a kernel for the product, or needs none: on the meta device."""
    if GROUPED_MM is None or x.dtype not in GROUPED_DTYPES or x.device.type == "cpu":
        return False
    sizes = (x.shape[1], *y.shape[-2:]) if y.dim() == 3 else (x.shape[1], y.shape[1])
    return _has_kernel(x.device) and not any(size % ALIGNMENT for size in sizes)


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    return device.type == "meta" or torch.cuda.get_device_capability(device) >= (9, 0)


def has_values(x: Tensor) -> bool:
    """Return False on the meta device, where estimates count what kernels allocate."""
    return x.device.type != "meta"


def _groups(offsets: Tensor) -> Sequence[tuple[int, tuple[int, int]]]:
    """Return the experts that have rows, and where these start and stop; none without values."""
    if not has_values(offsets):
        return []
    ends = offsets.tolist()
    pairs = enumerate(zip([0, *ends[:-1]], ends, strict=True))
    return [(expert, pair) for expert, pair in pairs if pair[0] < pair[1]]
