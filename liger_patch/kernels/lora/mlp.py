"""A gated feed-forward layer (arXiv:2002.05202) whose projections carry LoRA adapters.

    gate = x Wg' + sg Sg Bg'      up = x Wu' + su Su Bu'      S = x A'
    a    = act(gate) * up         y  = a Wd' + sd Sd Bd'      Sd = a Ad'

Kept are x, the base's products x Wg' and x Wu', and the thin S and Sd: 2 H + 4 I bytes a token in
16 bits. What the adapters add to gate and up, the activation, and the part of da that comes through
Ad are computed again within the kernel that turns da into dgate and dup. It also sums dB of gate
and of up and dA of down, so that nothing of the size of gate is read or written for them.

y is a function of its own that saves no tensor: gradient checkpointing computes again only as far
as the last tensor that is saved, and so leaves out the last product. In slices (``sliced``) x alone
is kept.

H: hidden size, I: intermediate size, R: rank, N: tokens.
"""

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    LAYER_ADVICE,
    check_backward,
    without_autocast,
)
from liger_patch.kernels.gated import ACTIVATIONS
from liger_patch.kernels.lora.activation import activate, activate_backward
from liger_patch.kernels.lora.products import (
    adapter_gradients_,
    b_gradient,
    base_gradients,
    base_product,
    input_gradient,
    joined_kept,
    product,
    split_kept,
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
from liger_patch.kernels.lora.sliced import SlicedMlp
from liger_patch.kernels.sliced import check_slice_tokens, run_sliced, slices_of


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
            a, s_down, kept_a = activate(gate, up, s, parts, down_a, dropout, activation)
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
            dgate, dup, ds, dbs, ddown_a = activate_backward(
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


def lora_mlp(
    x: Tensor,  # (..., H)
    gate: LoraProjection,
    up: LoraProjection,
    down: LoraProjection,
    *,
    activation: str = "silu",
    slice_tokens: int | None = None,
) -> Tensor:
    """Compute ``(act(gate(x)) * up(x)) Wd'`` and what three adapters add.

    Under autocast the products run in the autocast dtype. Each gradient has its input's dtype.

    Args:
        x: (..., H), floating point.
        gate, up: of H features to I.
        down: of I features to O, which is mostly H.
        activation: "silu", "gelu_tanh" or "gelu".
        slice_tokens: keeps x alone, and runs over slices of so many tokens, forward and backward,
            which computes the first two products again: for gradient checkpointing, which then
            does not. None: all at once; so does dropout where its masks are tensors.

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
    check_projection("down", down, size, x)
    check_slice_tokens(slice_tokens)
    if slice_tokens is not None and SlicedMlp.serves(x, dtype, (gate, up, down)):
        slices, (fixed, tensors) = slices_of(x, slice_tokens), flattened((gate, up, down))
        out_features = down.weight.shape[0]
        layer = SlicedMlp(fixed, dtype, activation, out_features, len(slices))
        return run_sliced(layer, x, tensors, slices)
    fixed, tensors = flattened((gate, up))
    down_fixed, down_tensors = flattened((down,))
    a, s = _GatedLora.apply(x, dtype, activation, down.dropout, fixed, *tensors, down.a)
    y = _DownLora.apply(a, s, down_fixed, *down_tensors)
    return y.view(*x.shape[:-1], y.shape[1])
