"""What experts of a mixture compute around their grouped products, by Triton's kernels or PyTorch's
operations. And their parameters: cast and padded for the products (``Layer``), with gradients in
the shape and dtype of each parameter (``Given``). The formulas and letters are in ``experts``.

There are eight parameters: weight, bias, A and B of the first product, and those of the second one;
each may be None. A and B are cast at each call, to a rank that the tensor cores multiply, and B is
multiplied by the adapter's scaling: all in one tensor, because gradient checkpointing runs some 40
Python calls for each that is saved for the backward pass.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from liger_patch.kernels.backend import accumulation_dtype, serves_triton
from liger_patch.kernels.gated import act
from liger_patch.kernels.grouped import Order, grouped_product, has_values

LEAST_RANK = 16  # what the tensor cores multiply
FIELDS = 4  # of a projection that are tensors


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


class Layer(NamedTuple):
    """Experts without their tensors.

    Attributes:
        scalings: of the adapters of both products.
        dtype: of the products.
        held: each ``DequantizedExperts`` in the place of a weight.
    """

    how: Activation
    scalings: tuple[float, float]
    dtype: torch.dtype
    held: Sequence[Any]

    def factor(self, i: int) -> float:
        """Return by what a parameter's gradient is multiplied: that of B by the scaling."""
        return self.scalings[i // FIELDS] if i % FIELDS == 3 else 1.0

    def cast_adapters(self, parameters: Sequence[Any]) -> Tensor | None:
        """Return A and B of both products in one tensor, of padded ranks, and B times its scaling;
        None without adapters.
        """
        shapes = _padded_shapes(parameters)
        if not shapes:
            return None
        sizes = [shape.numel() for shape in shapes.values()]
        like: Tensor = next(parameters[i] for i in shapes)
        adapters = like.new_empty(sum(sizes), dtype=self.dtype)
        if any(shape != parameters[i].shape for i, shape in shapes.items()):
            adapters.zero_()
        for i, each in _adapters(adapters, shapes).items():
            own, factor = parameters[i], self.factor(i)
            if each.shape != own.shape:
                each = each[:, : own.shape[1], : own.shape[2]]
            each.copy_(own) if factor == 1.0 else torch.mul(own, factor, out=each)
        return adapters

    def projections(
        self, parameters: Sequence[Any], adapters: Tensor | None, given: Sequence[Any] | None = None
    ) -> list[ExpertProjection]:
        """Return both projections: weights and biases of ``parameters``, and adapters of the shapes
        of ``given``, by default of ``parameters``.
        """
        shapes = _padded_shapes(parameters if given is None else given)
        parts = {} if adapters is None else _adapters(adapters, shapes)
        found = []
        for i, held in zip((0, FIELDS), self.held, strict=True):
            weight, bias = parameters[i : i + 2]
            weight = held if weight is None else weight
            bias = None if bias is None else bias.to(self.dtype).contiguous()
            found.append(ExpertProjection(weight, bias, parts.get(i + 2), parts.get(i + 3)))
        return found

    def prepared(self, parameters: Sequence[Any]) -> list[ExpertProjection]:
        """Return both projections with dense weights, for all slices of a pass."""
        with torch.no_grad():
            parts = self.projections(parameters, self.cast_adapters(parameters))
            return [part._replace(weight=part.dense(self.dtype)) for part in parts]


def _padded_shapes(given: Sequence[Any]) -> dict[int, torch.Size]:
    """Return the shapes of A and B of padded ranks, by their places among the parameters."""
    found = {}
    for i, each in enumerate(given):
        if each is not None and i % FIELDS > 1:
            shape = each.shape
            axis = i % FIELDS - 1  # of the rank
            padded = max(LEAST_RANK, 1 << (shape[axis] - 1).bit_length())
            found[i] = torch.Size((*shape[:axis], padded, *shape[axis + 1 :]))
    return found


def _adapters(joined: Tensor, shapes: dict[int, torch.Size]) -> dict[int, Tensor]:
    """Return the parts of one tensor that ``cast_adapters`` returns, by their places."""
    parts = joined.split([shape.numel() for shape in shapes.values()])
    return {i: part.view(shape) for (i, shape), part in zip(shapes.items(), parts, strict=True)}


class Given(NamedTuple):
    """What a parameter's gradient must be like; ``takes_turns``: whether experts lie side by side
    in memory, as in PEFT's B.
    """

    shape: torch.Size
    dtype: torch.dtype
    takes_turns: bool

    @classmethod
    def like(cls, parameter: Tensor | None) -> "Given | None":
        if parameter is None:
            return None
        turns = parameter.dim() == 3 and parameter.stride(0) == 1 != len(parameter)
        return cls(parameter.shape, parameter.dtype, turns)

    def cut(self, gradient: Tensor) -> Tensor:
        """Return a gradient without what a padded rank added."""
        if gradient.shape == self.shape:
            return gradient
        return gradient[:, : self.shape[1], : self.shape[2]]

    def times(self, gradient: Tensor, factor: float) -> Tensor:
        """Return a gradient times a factor."""
        gradient = self.cut(gradient)
        if self.takes_turns:
            experts, *others = self.shape
            out = gradient.new_empty(*others, experts, dtype=self.dtype).permute(2, 0, 1)
        elif factor == 1.0:
            return gradient.to(self.dtype)
        else:
            out = gradient.new_empty(self.shape, dtype=self.dtype)
        return torch.mul(gradient, factor, out=out)

    def added(self, total: Tensor | None, gradient: Tensor, factor: float) -> Tensor:
        """Add a gradient times a factor to a sum in float32, which is made here if it is None."""
        if total is None:
            return self._replace(dtype=accumulation_dtype(self.dtype)).times(gradient, factor)
        return total.add_(self.cut(gradient), alpha=factor)


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
