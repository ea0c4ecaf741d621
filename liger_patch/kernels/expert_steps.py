"""What experts of a mixture compute: slots in the order of their experts, products of the rows of
each expert with its matrix, and the steps around these, by Triton's kernels or PyTorch's
operations. The formulas and letters are in ``experts``.

PyTorch's ``grouped_mm`` computes the products in bf16 from compute capability 9 on, and the host
reads no counts. Elsewhere it reads them, and multiplies group by group.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from liger_patch.kernels.backend import accumulation_dtype, serves_triton, serves_triton_device
from liger_patch.kernels.gated import act

GROUPED_MM: Any = getattr(functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
GROUPED_DTYPES = (torch.bfloat16,)  # others PyTorch multiplies in a loop of its own
ALIGNMENT = 8  # numbers of 16 bits in the 16 bytes that grouped products read


class Order(NamedTuple):
    """The order of slots by expert.

    Attributes:
        index: (N, K), the experts of each token; only biases need it.
        offsets: (E,) int32, where the slots of each expert end.
        slots: (S,) int32, the place of each sorted slot in ``index``.
        places: (N, K) int32, the place of each slot among the sorted ones.
        numbers: (E + 2 S,), which holds offsets, slots and places.
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


class Activation(NamedTuple):
    """What experts compute of gate and up.

    Attributes:
        name: "silu", "gelu_tanh", "gelu", or "clamped": ``gate sigmoid(alpha gate) (up + shift)``
            of gate <= limit and -limit <= up <= limit (gpt-oss, DeepSeek-V4).
        is_interleaved: whether gate and up take turns in the features of the first product. They
            are its halves otherwise.
    """

    name: str = "silu"
    alpha: float = 1.0
    limit: float = float("inf")
    shift: float = 0.0
    is_interleaved: bool = False


class DequantizedExperts(Protocol):
    """A weight (E, in, out) without a gradient that is dequantized where a product needs it.

    Attributes:
        shape, device: of the dequantized weight.
    """

    shape: torch.Size
    device: torch.device

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight (E, in, out), in new memory."""
        ...


class ExpertProjection(NamedTuple):
    """A linear layer of each expert.

    Attributes:
        weight: (E, in, out), a view of any strides; or one that is dequantized at each use.
        bias: (E, out), or None.
        a, b: (E, R, in) and (E, out, R) of the adapter; None for no adapter.
        scaling: factor on what the adapter adds.
    """

    weight: Any
    bias: Tensor | None = None
    a: Any = None
    b: Any = None
    scaling: float = 1.0

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in a dtype."""
        own = self.weight
        return own.to(dtype) if isinstance(own, Tensor) else own.dequantized(dtype)


def _serves(x: Tensor) -> bool:
    """Return whether Triton's kernels serve grouped rows: they multiply by the tensor cores."""
    # Triton's interpreter multiplies the bits of bf16 as whole numbers
    served = (torch.float16, torch.bfloat16) if x.is_cuda else (torch.float16,)
    return x.dtype in served and serves_triton(x) and len(x) > 0


def gathered(x: Tensor, order: Order, a: Tensor | None) -> tuple[Tensor, Any]:
    """Return the rows of x (N, H) for each slot (S, H), and their products with a' of their experts
    (S, R); a: (E, R, H), of any strides.
    """
    if not _serves(x):
        rows = x[order.tokens()]
        thin = None if a is None else grouped_product(rows, a.transpose(1, 2), order.offsets)
        return rows, thin
    from liger_patch.kernels.triton import expert_rows

    rows = x.new_empty(len(order.slots), x.shape[1])
    thin = None if a is None else x.new_empty(len(rows), a.shape[1])
    expert_rows.gather(x.contiguous(), order.slots, rows, a, thin, order.offsets)
    return rows, thin


def add_thin_(y: Tensor, thin: Tensor, b: Tensor, order: Order) -> None:
    """Add ``thin b'`` of each expert, b (E, out, R), to y (S, out)."""
    if _serves(y):
        from liger_patch.kernels.triton import experts as experts_triton

        experts_triton.add_thin_(y, thin, b, order.offsets)
        return
    if has_values(y):
        y += grouped_product(thin, b.transpose(1, 2), order.offsets)


def sum_slots_(
    out: Tensor, y: Tensor, order: Order, weights: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Write the sum (N, H) of each token's slots, with biases, times weights; return it."""
    if serves_triton(y, weights, bias):
        from liger_patch.kernels.triton import expert_rows

        expert_rows.sum_slots(y, order.places, weights, bias, order.index, out)
        return out
    if not has_values(y):
        return out
    slots = y[order.places].to(accumulation_dtype(y.dtype))  # (N, K, H)
    if bias is not None:
        slots += bias[order.index]
    if weights is not None:
        slots *= weights[..., None]
    return out.copy_(slots.sum(1))


def gated(
    gate_up: Tensor, first: ExpertProjection, thin: Any, last: ExpertProjection, order: Order,
    how: Activation,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Return h (S, I), and D of the second product's adapter (S, R)."""
    h = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    if _serves(gate_up):
        from liger_patch.kernels.triton import experts as experts_triton

        down_thin = None if last.a is None else h.new_empty(len(h), last.a.shape[1])
        tensors = gate_up, first.bias, thin, first.b, last.a, down_thin, h
        experts_triton.gated(*tensors, order.offsets, *how)
        return h, down_thin
    if has_values(h):
        h.copy_(_h(_full_gate_up(gate_up, first, thin, order), how))
    if last.a is None:
        return h, None
    return h, grouped_product(h, last.a.transpose(1, 2), order.offsets)


def gated_backward_(
    dh: Tensor,
    gate_up: Tensor,
    first: ExpertProjection,
    thin: Any,
    last: ExpertProjection,
    down_thin: Any,
    ddown_thin: Any,
    weights: Tensor,  # (N, K)
    order: Order,
    how: Activation,
    dtype: torch.dtype,
) -> tuple[Tensor, Any, Tensor, Any]:
    """Return the gradient of gate and up, that of ``thin``, that of the weights (N, K) in a dtype,
    and the weights times D. dh becomes the weights times h.
    """
    dweights = weights.new_empty(weights.shape, dtype=dtype)
    dgate_up = torch.empty_like(gate_up)
    if _serves(dh):
        from liger_patch.kernels.triton import experts as experts_triton

        dthin, weighted = (x if x is None else torch.empty_like(x) for x in (thin, down_thin))
        experts_triton.gated_backward_(
            dh, gate_up, dgate_up, first.bias, thin, first.b, dthin, ddown_thin, last.a,
            down_thin, weighted, weights, dweights, order.slots, order.offsets, *how,
        )  # fmt: skip
        return dgate_up, dthin, dweights, weighted
    sorted_weights = weights.view(-1)[order.slots][:, None]
    if has_values(dh):
        full = _full_gate_up(gate_up, first, thin, order)
        wide = dh.to(full.dtype)
        if ddown_thin is not None:
            a = last.a.to(full.dtype).transpose(1, 2)
            add_thin_(wide, ddown_thin.to(full.dtype), a, order)
        with torch.enable_grad():
            leaf = full.detach().requires_grad_()
            h = _h(leaf, how)
        dweights.view(-1)[order.slots] = (wide * h.detach()).sum(1).to(dtype)
        dgate_up.copy_(torch.autograd.grad(h, leaf, wide * sorted_weights)[0])
        dh.copy_(h.detach() * sorted_weights)
    dthin = None if thin is None else grouped_product(dgate_up, first.b, order.offsets)
    weighted = None if down_thin is None else (down_thin * sorted_weights).to(down_thin.dtype)
    return dgate_up, dthin, dweights, weighted


def _h(gate_up: Tensor, how: Activation) -> Tensor:
    """Return act(gate) * up, with PyTorch's operations."""
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if how.is_interleaved else (
        gate_up.chunk(2, -1)
    )  # fmt: skip
    if how.name != "clamped":
        return act(gate, how.name) * up
    gate, up = gate.clamp(max=how.limit), up.clamp(-how.limit, how.limit)
    return gate * torch.sigmoid(gate * how.alpha) * (up + how.shift)


def _full_gate_up(gate_up: Tensor, first: ExpertProjection, thin: Any, order: Order) -> Tensor:
    """Return gate and up with bias and adapter, in the dtype of sums."""
    full = gate_up.to(accumulation_dtype(gate_up.dtype))
    if first.bias is not None:
        full = full + first.bias[order.index.reshape(-1)[order.slots]]
    if first.b is not None:
        b = first.b.transpose(1, 2).to(full.dtype)
        full = full + grouped_product(thin.to(full.dtype), b, order.offsets)
    return full
