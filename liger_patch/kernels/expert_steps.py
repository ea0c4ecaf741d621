"""What experts of a mixture compute around their grouped products, by Triton's kernels or PyTorch's
operations. The formulas and letters are in ``experts``.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, serves_triton
from liger_patch.kernels.gated import act
from liger_patch.kernels.grouped import Order, grouped_product, has_values


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
    """Write the sum of each token's slots (N, H), each times its weight; return it."""
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
