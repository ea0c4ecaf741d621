"""Experts of a mixture (arXiv:2101.03961): gated feed-forward layers, of which each token takes K.

For a slot s, which is a token n and one of its experts e, with sorted rows x_s = x[n]:

    gate, up = halves of x_s W1e + S B1e' + b1e       S = x_s A1e'
    h        = act(gate) * up                         D = h A2e'
    y_s      = h W2e + D B2e' + b2e                   y[n] = sum of weight_s y_s over slots of n

Slots are sorted by expert, so each product is one grouped product: PyTorch's ``grouped_mm``. B is
cast times the adapter's scaling; adapters are never added to weights. Backward, with g_s = dy[n]:

    dh = g_s W2e' + (g_s B2e) A2e          dweight_s = dh . h + g_s . b2e

and one kernel computes h again, dgate and dup of weight_s dh, and dweight_s. y is a gather of each
token's slots: nothing is added by atomics, so results repeat bit by bit. The host reads no counts
where PyTorch has a kernel for grouped products: in bf16, from compute capability 9 on.

N: tokens, H: hidden size, I: intermediate size, E: experts, R: ranks, S = N K. Kept for the
backward pass, in bytes a token in 16 bits: x, 2 H, and K times gate and up, 4 I, and the thin S and
D, 2 R each. Extra memory of the backward pass: 4 H + 6 I a slot.

As with ``gated_mlp``, two functions share the work: gradient checkpointing computes the first one
again, which ends before the product with W2.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    LAYER_ADVICE,
    accumulation_dtype,
    autocast_dtype,
    check_backward,
    serves_triton,
    without_autocast,
)
from liger_patch.kernels.gated import ACTIVATIONS, act
from liger_patch.kernels.gated_mlp import Result
from liger_patch.kernels.grouped import (
    ALIGNMENT,
    Order,
    grouped_outer,
    grouped_product,
    has_values,
    order_of,
)

LEAST_RANK = 16  # what the tensor cores multiply


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


SWIGLU = Activation()


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


def _serves(x: Tensor) -> bool:
    """Return whether Triton's kernels serve grouped rows: they multiply by the tensor cores."""
    # Triton's interpreter multiplies the bits of bf16 as whole numbers
    served = (torch.float16, torch.bfloat16) if x.is_cuda else (torch.float16,)
    return x.dtype in served and serves_triton(x) and len(x) > 0


def _add_thin_(y: Tensor, thin: Tensor, b: Tensor, offsets: Tensor) -> None:
    """Add ``thin b'`` of each expert, b (E, out, R), to y (S, out)."""
    if _serves(y):
        from liger_patch.kernels.triton import experts as experts_triton

        experts_triton.add_thin_(y, thin, b, offsets)
        return
    if has_values(y):
        y += grouped_product(thin, b.transpose(1, 2), offsets)


def _sum_slots(
    y: Tensor, order: Order, weights: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the sum of each token's slots (N, H), each times its weight."""
    out = y.new_empty(len(order.places), y.shape[1], dtype=dtype)
    if serves_triton(y, weights, bias):
        from liger_patch.kernels.triton import experts as experts_triton

        experts_triton.sum_slots(y, order.places, weights, bias, order.index, out)
        return out
    if not has_values(y):
        return out
    slots = y[order.places].to(accumulation_dtype(y.dtype))  # (N, K, H)
    if bias is not None:
        slots += bias[order.index]
    if weights is not None:
        slots *= weights[..., None]
    return out.copy_(slots.sum(1))


def _halves(gate_up: Tensor, is_interleaved: bool) -> tuple[Tensor, Tensor]:
    if is_interleaved:
        return gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, -1)
    return gate, up


def _h(gate_up: Tensor, how: Activation) -> Tensor:
    """Return act(gate) * up, with PyTorch's operations."""
    gate, up = _halves(gate_up, how.is_interleaved)
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


class _FirstProducts(torch.autograd.Function):
    """x to link, h and D: keeps what the backward pass needs, and computes every gradient."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # (N, H)
        weights: Tensor,  # (N, K)
        order: Order,
        how: Activation,
        scalings: tuple[float, float],
        dtype: torch.dtype,
        held: list[DequantizedExperts | None],  # in the place of weights
        *parameters: Tensor | None,
    ):
        first, last = _cast(parameters, scalings, dtype)
        rows = x[order.tokens]
        thin = None if first.a is None else _thin(rows, first.a, order)
        gate_up = grouped_product(rows, _dense(first, held[0], dtype), order.offsets)
        del rows
        h = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        if _serves(gate_up):
            from liger_patch.kernels.triton import experts as experts_triton

            tensors = gate_up, first.bias, thin, first.b, h
            experts_triton.gated(*tensors, order.offsets, *how)
        elif has_values(h):
            h.copy_(_h(_full_gate_up(gate_up, first, thin, order), how))
        last_thin = None if last.a is None else _thin(h, last.a, order)
        ctx.how, ctx.scalings, ctx.held = how, scalings, held
        ctx.given = [None if each is None else (each.shape, each.dtype) for each in parameters]
        made = x, weights, gate_up, thin, last_thin, *order
        ctx.save_for_backward(first.weight, last.weight, *made, *first[1:4], *last[1:4])
        ctx.set_materialize_grads(False)
        results = h, last_thin, last.b
        ctx.mark_non_differentiable(*(each for each in results if each is not None))
        return x.new_empty(()).expand(x.shape), *results

    @staticmethod
    def backward(ctx, dy: Tensor | None, *_: None):
        check_backward("experts", dy, advice=LAYER_ADVICE)
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        first_weight, last_weight, *saved = ctx.saved_tensors
        # hooks may give them back in other strides
        saved: list[Any] = [each if each is None else each.contiguous() for each in saved]
        x, weights, gate_up, thin, last_thin, *saved = saved
        order, offsets = Order(*saved[:5]), saved[4]
        first = ExpertProjection(first_weight, *saved[5:8])
        last = ExpertProjection(last_weight, *saved[8:])
        del saved
        wants_x, wants_weights, _, _, _, _, _, *wanted = ctx.needs_input_grad
        with without_autocast(dy.device.type):
            found: list[Tensor | None] = [None] * len(wanted)
            upstream = dy.to(gate_up.dtype)[order.tokens]  # (S, H)
            weight = _dense(last, ctx.held[1], gate_up.dtype)
            dh = grouped_product(upstream, weight.transpose(1, 2), offsets)
            del weight
            dlast_thin: Any = None if last.b is None else grouped_product(upstream, last.b, offsets)
            sorted_weights = weights.reshape(-1)[order.slots]
            h, dgate_up, dweights = _gated_backward_(
                dh, gate_up, first, thin, last, dlast_thin, sorted_weights, order, ctx.how
            )
            del dh, gate_up
            if wanted[4]:
                found[4] = _weight_gradient(h, upstream, last.weight, offsets)
            if wanted[5]:
                found[5] = _sums((upstream * sorted_weights[:, None]).to(upstream.dtype), offsets)
            if last.b is not None:
                if wanted[6]:
                    found[6] = grouped_outer(dlast_thin, h, offsets)
                if wanted[7]:
                    weighted = (last_thin * sorted_weights[:, None]).to(last_thin.dtype)
                    found[7] = grouped_outer(upstream, weighted, offsets)
            if last.bias is not None and wants_weights:
                of_bias = dy.to(dweights.dtype) @ last.bias.to(dweights.dtype).t()  # (N, E)
                dweights = dweights + of_bias.gather(1, order.index).view(-1)[order.slots]
            dw = dweights[order.places].to(weights.dtype) if wants_weights else None
            del h, upstream, dlast_thin
            dthin: Any = None
            if first.b is not None:
                dthin = grouped_product(dgate_up, first.b, offsets)
            if any(wanted[:3]):
                rows = x[order.tokens]
                if wanted[0]:
                    found[0] = _weight_gradient(rows, dgate_up, first.weight, offsets)
                if wanted[2]:
                    found[2] = grouped_outer(dthin, rows, offsets)
                del rows
            if wanted[1]:
                found[1] = _sums(dgate_up, offsets)
            if wanted[3]:
                found[3] = grouped_outer(dgate_up, thin, offsets)
            dx = None
            if wants_x:
                weight = _dense(first, ctx.held[0], dgate_up.dtype)
                drows = grouped_product(dgate_up, weight.transpose(1, 2), offsets)
                del dgate_up, weight
                if dthin is not None:
                    _add_thin_(drows, dthin, first.a.transpose(1, 2), offsets)
                dx = _sum_slots(drows, order, None, None, x.dtype)
            factors = [1.0, 1.0, 1.0, ctx.scalings[0], 1.0, 1.0, 1.0, ctx.scalings[1]]
            for i, each in enumerate(found):
                if each is not None:
                    shape, dtype = ctx.given[i]
                    found[i] = _as_given(each, shape, dtype, factors[i])
        return dx, dw, None, None, None, None, None, *found


def _dense(
    projection: ExpertProjection, held: DequantizedExperts | None, dtype: torch.dtype
) -> Tensor:
    return projection.weight.to(dtype) if held is None else held.dequantized(dtype)


def _as_given(gradient: Tensor, shape: torch.Size, dtype: torch.dtype, factor: float) -> Tensor:
    """Return a gradient without what a padded rank added, times a factor."""
    if gradient.shape != shape:
        gradient = gradient[:, : shape[1], : shape[2]]
    if factor == 1.0:
        return gradient.to(dtype)
    return torch.mul(gradient, factor, out=gradient.new_empty(gradient.shape, dtype=dtype))


def _thin(x: Tensor, a: Tensor, order: Order) -> Tensor:
    return grouped_product(x, a.transpose(1, 2), order.offsets)


def _gated_backward_(
    dh: Tensor,
    gate_up: Tensor,
    first: ExpertProjection,
    thin: Tensor | None,
    last: ExpertProjection,
    dlast_thin: Tensor | None,
    weights: Tensor,  # (S,)
    order: Order,
    how: Activation,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight h, which takes the place of dh, the gradient of gate and up, and dweight."""
    dweights = weights.new_empty(weights.shape, dtype=accumulation_dtype(dh.dtype))
    if not has_values(dh):
        return dh, torch.empty_like(gate_up), dweights
    if _serves(dh):
        from liger_patch.kernels.triton import experts as experts_triton

        dgate_up = torch.empty_like(gate_up)
        tensors = gate_up, dgate_up, first.bias, thin, first.b, dlast_thin, last.a, weights
        experts_triton.gated_backward_(dh, *tensors, dweights, order.offsets, *how)
        return dh, dgate_up, dweights
    full = _full_gate_up(gate_up, first, thin, order)
    wide = dh.to(full.dtype)
    if dlast_thin is not None and last.a is not None:
        _add_thin_(
            wide, dlast_thin.to(full.dtype), last.a.to(full.dtype).transpose(1, 2),
            order.offsets,
        )  # fmt: skip
    with torch.enable_grad():
        leaf = full.detach().requires_grad_()
        h = _h(leaf, how)
    dweights.copy_((wide * h.detach()).sum(1))
    (dgate_up,) = torch.autograd.grad(h, leaf, wide * weights[:, None])
    dh.copy_(h.detach() * weights[:, None])
    return dh, dgate_up.to(gate_up.dtype), dweights


def _weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return dW (E, in, out), in memory as the weight lies."""
    if weight.stride(2) == 1:
        return grouped_outer(x, dy, offsets)
    return grouped_outer(dy, x, offsets).transpose(1, 2)


def _sums(rows: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of each expert's rows (E, out)."""
    ones = rows.new_ones(len(rows), ALIGNMENT)
    return grouped_outer(ones, rows, offsets)[:, 0]


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    first: ExpertProjection,
    last: ExpertProjection,
    *,
    activation: Activation = SWIGLU,
) -> Tensor:
    """Compute the weighted sum of K gated feed-forward layers for each token.

    Under autocast the products run in the autocast dtype. Each gradient has its input's dtype.

    Args:
        x: (N, H), floating point.
        index: (N, K), integers in [0, E): the experts of each token.
        weights: (N, K): the factor of each expert's result.
        first: H features to gate and up, 2 I.
        last: I features to H.
        activation: what is computed between the two.

    Returns:
        (N, H) in the dtype of x.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    _check(x, index, weights, first, last, activation)
    dtype = autocast_dtype(x.device.type, x.dtype) or x.dtype
    return run_experts(x, index, weights, first, last, activation, dtype)


def run_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    first: ExpertProjection,
    last: ExpertProjection,
    activation: Activation,
    dtype: torch.dtype,
) -> Tensor:
    """Compute what ``experts`` does, of arguments that fit, with products in a dtype."""
    order = order_of(index, first.weight.shape[0])
    scalings = first.scaling, last.scaling
    held = [None if isinstance(p.weight, Tensor) else p.weight for p in (first, last)]
    first, last = (
        p if each is None else p._replace(weight=None)
        for p, each in zip((first, last), held, strict=True)
    )
    with without_autocast(x.device.type):
        weights = weights.contiguous()
        how = order, activation, scalings, dtype, held
        link, h, thin, b = _FirstProducts.apply(x.to(dtype), weights, *how, *first[:4], *last[:4])

        def result() -> Tensor:
            y = grouped_product(h, _dense(last, held[1], dtype), order.offsets)
            if thin is not None:
                _add_thin_(y, thin, b, order.offsets)
            bias = None if last.bias is None else last.bias.to(dtype).contiguous()
            return _sum_slots(y, order, weights, bias, dtype)

        return Result.apply(link, result).to(x.dtype)


def _cast(
    parameters: Sequence[Any], scalings: tuple[float, float], dtype: torch.dtype
) -> list[ExpertProjection]:
    """Return both projections in a dtype, all but weights contiguous: A and B of a padded rank, B
    times its scaling.
    """
    found = []
    for i, scaling in enumerate(scalings):
        weight, bias, a, b = parameters[4 * i : 4 * i + 4]
        weight = None if weight is None else weight.to(dtype)
        bias = None if bias is None else bias.to(dtype).contiguous()
        if a is not None:
            rank = a.shape[1]
            padded = max(LEAST_RANK, 1 << (rank - 1).bit_length())
            make = a.new_empty if rank == padded else a.new_zeros
            a, own_a = make(len(a), padded, a.shape[2], dtype=dtype), a
            b, own_b = make(len(b), b.shape[1], padded, dtype=dtype), b
            a[:, :rank].copy_(own_a)
            torch.mul(own_b, scaling, out=b[:, :, :rank])
        found.append(ExpertProjection(weight, bias, a, b))
    return found


def _check(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    first: ExpertProjection,
    last: ExpertProjection,
    activation: Activation,
) -> None:
    names = (*ACTIVATIONS, "clamped")
    if activation.name not in names:
        raise ValueError(f"activation.name must be one of {names}, got {activation.name!r}")
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x must be floating point (N, H), got {x.dtype} {tuple(x.shape)}")
    if index.dim() != 2 or index.is_floating_point() or len(index) != len(x):
        raise ValueError(
            f"index must be ({len(x)}, K) integers, got {index.dtype} {tuple(index.shape)}"
        )
    if weights.shape != index.shape:
        raise ValueError(
            f"weights must have the shape of index, {tuple(index.shape)}, "
            f"got {tuple(weights.shape)}"
        )
    for name, part in (("first", first), ("last", last)):
        if part.weight.dim() != 3:
            raise ValueError(f"{name}.weight must be (E, in, out), got {tuple(part.weight.shape)}")
    count, hidden = first.weight.shape[0], x.shape[1]
    size = last.weight.shape[1]
    for name, part, shape in (
        ("first", first, (count, hidden, 2 * size)),
        ("last", last, (count, size, hidden)),
    ):
        if tuple(part.weight.shape) != shape:
            raise ValueError(f"{name}.weight must be {shape}, got {tuple(part.weight.shape)}")
        if (part.a is None) != (part.b is None):
            raise ValueError(f"{name}.a and {name}.b must both be given, or none of them")
        rank = 0 if part.a is None or part.a.dim() < 2 else part.a.shape[1]
        for which, tensor, wanted in (
            ("bias", part.bias, (count, shape[2])),
            ("a", part.a, (count, rank, shape[1])),
            ("b", part.b, (count, shape[2], rank)),
        ):
            if tensor is not None and tuple(tensor.shape) != wanted:
                raise ValueError(f"{name}.{which} must be {wanted}, got {tuple(tensor.shape)}")
        for which, tensor in zip(("weight", "bias", "a", "b"), part[:4], strict=True):
            if tensor is not None and not tensor.is_floating_point():
                raise ValueError(f"{name}.{which} must be floating point, got {tensor.dtype}")
            if tensor is not None and tensor.device != x.device:
                raise ValueError(f"{name}.{which} must be on {x.device}, got {tensor.device}")
    for name, tensor in (("index", index), ("weights", weights)):
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on {x.device}, got {tensor.device}")
