"""A gated feed-forward layer (arXiv:2002.05202) whose projections carry LoRA adapters.

    gate = x Wg' + sg Sg Bg'      up = x Wu' + su Su Bu'      S = x A'
    a    = act(gate) * up         y  = a Wd' + sd Sd Bd'      Sd = a Ad'

Kept are x, the base's products x Wg' and x Wu', and the thin S and Sd: 2 H + 4 I bytes a token in
16 bits. What the adapters add to gate and up, the activation, and the part of da that comes through
Ad are computed again within the kernel that turns da into dgate and dup. It also sums dB of gate
and of up and dA of down, so that nothing of the size of gate is read or written for them.

y is computed by a function of its own, which saves no tensor for the backward pass, but a where Wd
trains. Gradient checkpointing computes a layer again only up to the last saved tensor, so it leaves
out the product of y. The function holds Sd, 2 R bytes a token that checkpoints keep too, and the
cast Bd. In slices (``sliced``), only x is kept.

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
from liger_patch.kernels.gated import ACTIVATIONS
from liger_patch.kernels.lora.activation import activate, activate_backward
from liger_patch.kernels.lora.products import (
    b_gradient,
    base_gradients,
    base_product,
    gradients_of_input_,
    joined_kept,
    product,
    split_kept,
    thin_products,
    upstream_thin_products,
)
from liger_patch.kernels.lora.projection import (
    Constants,
    LoraProjection,
    a_dtypes,
    bases_of,
    cast_matrices,
    check_projection,
    flattened,
    products_dtype,
    restored,
)
from liger_patch.kernels.lora.sliced import SlicedMlp
from liger_patch.kernels.rows import rows_of
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
        fixed: list[Constants],  # of all three
        adapters: list[Tensor],  # A of gate and up as one, B of both and A of down, cast
        *tensors: Tensor | None,  # of gate and up, and A (R, I) of down
    ):
        ctx.set_materialize_grads(False)
        bases, (a_gates, *bs, down_a) = bases_of(tensors[:-1]), adapters
        parts = restored(fixed[:2], bases, a_gates, bs)
        with without_autocast(x.device.type):
            rows = rows_of(x).to(dtype)
            s, kept = thin_products(rows, a_gates, parts)
            gate, up = (base_product(rows, part) for part in parts)
            a, s_down, kept_a = activate(gate, up, s, parts, down_a, dropout, activation)
        ctx.fixed, ctx.activation, ctx.dropout = fixed, activation, dropout
        ctx.dtype, ctx.shape = x.dtype, x.shape
        ctx.seeds, masks = split_kept((*kept, kept_a))
        ctx.save_for_backward(rows, s, gate, up, *adapters, *masks, *bases)
        return a, s_down

    @staticmethod
    def backward(ctx, da: Tensor | None, ds_down: Tensor | None):
        if da is None or ds_down is None:
            return (None,) * len(ctx.needs_input_grad)
        x, s, gate, up, a_gates, gate_b, up_b, down_a, *tensors = ctx.saved_tensors
        masks, bases = tensors[:3], tensors[3:]
        *kept, kept_a = joined_kept(ctx.seeds, masks)
        *fixed, of_down = ctx.fixed
        parts = restored(fixed, bases, a_gates, (gate_b, up_b))
        wants_x, _, _, _, _, _, *wanted, _ = ctx.needs_input_grad
        how = kept_a, ctx.dropout, ctx.activation, [*(f.b_dtype for f in fixed), of_down.a_dtype]
        with without_autocast(x.device.type):
            dgate, dup, ds, dbs, ddown_a = activate_backward(
                da, ds_down, gate, up, s, parts, down_a, *how
            )
            del da, gate, up  # under checkpoints, nothing else holds them
            dys = (dgate, dup)
            dx = ds.new_empty(x.shape, dtype=ctx.dtype) if wants_x else None
            dtypes = a_dtypes(fixed, wanted[2::4])
            das = gradients_of_input_(dx, x, a_gates, dys, parts, ds, kept, dtypes)
            gradients: list[Tensor | None] = []
            for i, (dy, part) in enumerate(zip(dys, parts, strict=True)):
                gradients += [*base_gradients(dy, x, part, wanted[4 * i :][:2]), das[i], dbs[i]]
        dx = None if dx is None else dx.view(ctx.shape)
        return dx, None, None, None, None, None, *gradients, ddown_a


class _DownLora(torch.autograd.Function):
    """a and Sd to y. Saves no tensor but a, where the weight trains."""

    @staticmethod
    def forward(
        ctx,
        a: Tensor,
        s: Tensor,
        leading: Sequence[int],  # of y (..., O)
        part: LoraProjection,  # with B cast
        b_dtype: torch.dtype,
        weight: Tensor | None,
        bias: Tensor | None,
        b: Tensor,
    ):
        with without_autocast(a.device.type):
            y = product(a, part, s, leading)
        ctx.part, ctx.s, ctx.b_dtype, ctx.versions = part, s, b_dtype, _versions(part)
        ctx.save_for_backward(a if ctx.needs_input_grad[5] else None)
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
        *_, wants_weight, wants_bias, wants_b = ctx.needs_input_grad
        dy = rows_of(dy).contiguous()
        with without_autocast(dy.device.type):
            da = dy @ part.dense(dy.dtype)
            ds = upstream_thin_products((dy,), (part,))
            wanted = wants_weight, wants_bias
            base = base_gradients(dy, dy if a is None else a, part, wanted)
            db = b_gradient(dy, part, ctx.s, ctx.b_dtype) if wants_b else None
        return da, ds, None, None, None, *base, db


def _versions(part: LoraProjection) -> list[int]:
    """Return the versions of what the backward pass reads: not A, whose product is the input."""
    read = part.weight, part.b
    tensors = (each for each in read if isinstance(each, Tensor) and not each.is_inference())
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
        slice_tokens: the tokens of a slice. Both passes then run slice by slice, only x is kept,
            and the backward pass computes the first two products again. It is meant for gradient
            checkpointing, which then need not compute them again. None, and dropout with masks that
            are tensors: all tokens at once.

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
    check_projection("gate", gate, x.shape[-1], x, dtype)
    check_projection("up", up, x.shape[-1], x, dtype)
    size = gate.weight.shape[0]
    if up.weight.shape[0] != size:
        raise ValueError(
            f"up.weight must have {size} rows as gate.weight has, got {up.weight.shape[0]}"
        )
    check_projection("down", down, size, x, dtype)
    check_slice_tokens(slice_tokens)
    return run_lora_mlp(x, gate, up, down, dtype, activation, slice_tokens)


def run_lora_mlp(
    x: Tensor,
    gate: LoraProjection,
    up: LoraProjection,
    down: LoraProjection,
    dtype: torch.dtype,
    activation: str,
    slice_tokens: int | None,
) -> Tensor:
    """Compute what ``lora_mlp`` does, of arguments that fit, with products in a dtype."""
    fixed, tensors = flattened((gate, up, down))
    if slice_tokens is not None and SlicedMlp.serves(x, dtype, (gate, up, down)):
        slices = slices_of(x, slice_tokens)
        out_features = down.weight.shape[0]
        layer = SlicedMlp(fixed, dtype, activation, out_features, len(slices))
        return run_sliced(layer, x, tensors, slices)
    *of_gates, weight, bias, _, _ = tensors
    matrices = (gate.a, up.a), (gate.b,), (up.b,), (down.a,), (down.b,)
    *adapters, down_b = cast_matrices(matrices, dtype)
    how = dtype, activation, down.dropout, fixed, adapters
    a, s = _GatedLora.apply(x, *how, *of_gates, down.a)
    part = down._replace(b=down_b)
    return _DownLora.apply(a, s, x.shape[:-1], part, down.b.dtype, weight, bias, down.b)
