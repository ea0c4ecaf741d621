"""A gated feed-forward layer (arXiv:2002.05202) whose projections carry LoRA adapters.

    gate = x Wg' + sg Sg Bg'      up = x Wu' + su Su Bu'      S = x A'
    a    = act(gate) * up         y  = a Wd' + sd Sd Bd'      Sd = a Ad'

Kept are x, the base's products x Wg' and x Wu', and the thin S and Sd: 2 H + 4 I bytes a token in
16 bits. What the adapters add to gate and up, the activation, and the part of da that comes through
Ad are computed again within the kernel that turns da into dgate and dup. It also sums dB of gate
and of up and dA of down, so that nothing of the size of gate is read or written for them.

y is a function of its own that saves no tensor: gradient checkpointing computes again only as far
as the last tensor that is saved, and so leaves out the last product.

H: hidden size, I: intermediate size, R: rank, N: tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    LAYER_ADVICE,
    check_backward,
    without_autocast,
)
from liger_patch.kernels.gated import ACTIVATIONS, gated_backward, gated_forward
from liger_patch.kernels.lora.products import (
    Kept,
    adapter_gradient_,
    adapter_gradients_,
    b_gradient,
    base_gradients,
    base_product,
    input_gradient,
    joined_kept,
    new_seed,
    product,
    serves_lora,
    split_kept,
    thin_product_,
    thin_products,
    upstream_thin_products,
)
from liger_patch.kernels.lora.projection import (
    LoraProjection,
    check_projection,
    flattened,
    products_dtype,
    restored,
    rows_of,
)


class _GatedLora(torch.autograd.Function):
    """x to a and Sd."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # (..., H)
        dtype: torch.dtype,
        activation: str,
        dropout: float,  # of the projection behind the activation
        fixed: list,
        *tensors: Tensor | None,  # of gate and up, and A (R, I) of down
    ):
        ctx.set_materialize_grads(False)
        *of_gates, down_a = tensors
        assert down_a is not None
        parts = restored(fixed, of_gates)
        with without_autocast(x.device.type):
            rows = rows_of(x).to(dtype)
            s, kept = thin_products(rows, parts)
            gate, up = (base_product(rows, part) for part in parts)
            a, s_down, kept_a = _activate(gate, up, s, parts, down_a, dropout, activation)
        ctx.fixed, ctx.activation, ctx.dropout = fixed, activation, dropout
        ctx.dtype, ctx.shape = x.dtype, x.shape
        ctx.seeds, masks = split_kept((*kept, kept_a))
        ctx.save_for_backward(rows, s, gate, up, *masks, *tensors)
        return a, s_down

    @staticmethod
    def backward(ctx, da: Tensor | None, ds_down: Tensor | None):
        x, s, gate, up, *masks, down_a = ctx.saved_tensors
        masks, of_gates = masks[:3], masks[3:]
        *kept, kept_a = joined_kept(ctx.seeds, masks)
        if da is None or ds_down is None:
            return (None,) * (6 + len(of_gates))
        parts = restored(ctx.fixed, of_gates)
        wants_x, *_ = ctx.needs_input_grad
        wanted = ctx.needs_input_grad[5:-1]
        with without_autocast(x.device.type):
            dgate, dup, ds, dbs, ddown_a = _activate_backward(
                da, ds_down, gate, up, s, parts, down_a, kept_a, ctx.dropout, ctx.activation
            )
            dys = (dgate, dup)
            dx = input_gradient(dys, parts, ctx.dtype) if wants_x else None
            das = adapter_gradients_(dx, x, parts, ds, kept, wanted[2::4])
            gradients: list[Tensor | None] = []
            for i, (dy, part) in enumerate(zip(dys, parts, strict=True)):
                gradients += [*base_gradients(dy, x, part, wanted[4 * i :][:2]), das[i], dbs[i]]
        dx = None if dx is None else dx.view(ctx.shape)
        return dx, None, None, None, None, *gradients, ddown_a


class _DownLora(torch.autograd.Function):
    """a and Sd to y. Saves no tensor but a, where the weight trains."""

    @staticmethod
    def forward(ctx, a: Tensor, s: Tensor, fixed: list, *tensors: Tensor | None):
        (part,) = restored(fixed, tensors)
        with without_autocast(a.device.type):
            y = product(a, part, s)
        ctx.part, ctx.s, ctx.versions = part, s, _versions(part)
        ctx.save_for_backward(a if ctx.needs_input_grad[3] else None)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        check_backward("lora_mlp", dy, advice=LAYER_ADVICE)
        part, (a,) = ctx.part, ctx.saved_tensors
        if _versions(part) != ctx.versions:
            raise RuntimeError(
                "a weight of the feed-forward layer was changed in place between its forward and "
                "its backward pass"
            )
        _, _, _, *wants_base, _, wants_b = ctx.needs_input_grad
        dy = dy.contiguous()
        with without_autocast(dy.device.type):
            da = input_gradient((dy,), (part,), dy.dtype)
            ds = upstream_thin_products((dy,), (part,), [len(part.a)])
            base = base_gradients(dy, dy if a is None else a, part, wants_base)
            db = b_gradient(dy, part, ctx.s) if wants_b else None
        return da, ds, None, *base, None, db


def _versions(part: LoraProjection) -> list[int]:
    tensors = (each for each in part if isinstance(each, Tensor) and not each.is_inference())
    return [each._version for each in tensors]


def _activate(
    gate: Tensor,  # (N, I) of the base
    up: Tensor,  # (N, I) of the base
    s: Tensor,  # (N, R of gate + R of up)
    parts: Sequence[LoraProjection],
    down_a: Tensor,  # (R, I)
    dropout: float,
    activation: str,
) -> tuple[Tensor, Tensor, Kept]:
    """Return a (N, I), Sd (N, R), and which features of a its adapter sees."""
    if _serves(gate, parts, down_a):
        from liger_patch.kernels.triton.gated_lora import gated_lora

        seed = new_seed() if dropout else None
        adapters = _adapters(parts, down_a, gate.dtype)
        return *gated_lora(gate, up, s, *adapters, seed, dropout, activation), seed
    a = gated_forward(*_with_adapters(gate, up, s, parts), activation)
    s_down = a.new_empty(len(a), len(down_a))
    return a, s_down, thin_product_(s_down, a, down_a, dropout)


def _activate_backward(
    da: Tensor,  # (N, I) through the base, overwritten
    ds_down: Tensor,  # (N, R)
    gate: Tensor,
    up: Tensor,
    s: Tensor,
    parts: Sequence[LoraProjection],
    down_a: Tensor,
    kept: Kept,
    dropout: float,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor]:
    """Return dgate, dup (N, I), ds (N, R of gate + R of up), dB of both and dA of down."""
    ranks = [len(part.a) for part in parts]
    if _serves(gate, parts, down_a) and not isinstance(kept, Tensor):
        from liger_patch.kernels.triton.gated_lora import gated_lora_backward_

        adapters = _adapters(parts, down_a, gate.dtype)
        dgate, dup, dgate_b, dup_b, ddown_a = gated_lora_backward_(
            da, ds_down, gate, up, s, *adapters, kept, dropout, activation
        )
        dbs = [dgate_b.to(parts[0].b.dtype), dup_b.to(parts[1].b.dtype)]
        ds = upstream_thin_products((dgate, dup), parts, ranks)
        return dgate, dup, ds, dbs, ddown_a.t().to(down_a.dtype)
    gate, up = _with_adapters(gate, up, s, parts)
    a = gated_forward(gate, up, activation)
    ddown_a = adapter_gradient_(da, a, down_a, ds_down, kept, True, dropout)
    assert ddown_a is not None
    del a
    dgate, dup = gated_backward(da, gate, up, activation)
    ds = upstream_thin_products((dgate, dup), parts, ranks)
    each = zip((dgate, dup), parts, s.split(ranks, 1), strict=True)
    return dgate, dup, ds, [b_gradient(*one) for one in each], ddown_a


def _with_adapters(
    gate: Tensor, up: Tensor, s: Tensor, parts: Sequence[LoraProjection]
) -> tuple[Tensor, Tensor]:
    gate_part, up_part = parts
    s_gate, s_up = s.split([len(part.a) for part in parts], 1)
    gate = torch.addmm(gate, s_gate, gate_part.b.to(gate.dtype).t(), alpha=gate_part.scaling)
    up = torch.addmm(up, s_up, up_part.b.to(up.dtype).t(), alpha=up_part.scaling)
    return gate, up


def _serves(gate: Tensor, parts: Sequence[LoraProjection], down_a: Tensor) -> bool:
    ranks = (*(len(part.a) for part in parts), len(down_a))
    return serves_lora(gate, max(ranks))


def _adapters(
    parts: Sequence[LoraProjection], down_a: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """Return what the Triton form takes of three adapters."""
    gate, up = parts
    gate_b, up_b, down_a = (each.to(dtype).contiguous() for each in (gate.b, up.b, down_a))
    return gate_b, up_b, down_a, gate.scaling, up.scaling


def lora_mlp(
    x: Tensor,  # (..., H)
    gate: LoraProjection,
    up: LoraProjection,
    down: LoraProjection,
    *,
    activation: str = "silu",
) -> Tensor:
    """Compute ``(act(gate(x)) * up(x)) Wd'`` and what three adapters add.

    Under autocast the products run in the autocast dtype. Each gradient has its input's dtype.

    Args:
        x: (..., H), floating point.
        gate, up: of H features to I.
        down: of I features to O, which is mostly H.
        activation: "silu", "gelu_tanh" or "gelu".

    Returns:
        (..., O), in the dtype of the products.

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit.
        RuntimeError: in the backward pass, with ``create_graph=True``, or where a weight of
            ``down`` was changed in place since the forward pass.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    dtype = products_dtype(x)
    check_projection("gate", gate, x.shape[-1], x)
    check_projection("up", up, x.shape[-1], x)
    size = gate.weight.shape[0]
    if up.weight.shape[0] != size:
        raise ValueError(
            f"up.weight must have {size} rows as gate.weight has, got {up.weight.shape[0]}"
        )
    fixed, tensors = flattened((gate, up))
    check_projection("down", down, size, x)
    down_fixed, down_tensors = flattened((down,))
    a, s = _GatedLora.apply(x, dtype, activation, down.dropout, fixed, *tensors, down.a)
    y = _DownLora.apply(a, s, down_fixed, *down_tensors)
    return y.view(*x.shape[:-1], y.shape[1])
