"""Linear layers with LoRA adapters (arXiv:2106.09685) that read one input, as one function.

For each projection i of the same x:

    s_i = dropout_i(x) A_i'          y_i = x W_i' + bias_i + scaling_i s_i B_i'

and with ds_i = scaling_i dy_i B_i:

    dA_i = ds_i' dropout_i(x)        dB_i = scaling_i dy_i' s_i
    dx   = sum_i dy_i W_i + dropout_i'(ds_i A_i)

Without dropout, the A of all projections form one matrix, and all s_i are a single thin product.
The product that computes an adapter's part adds it to y or dx at once, so there is no temporary of
that size. Weights are dequantized or cast at each use, and not kept in that form. A and B are cast
once, and the cast copies are kept.

N: tokens, H: features of x, O: of y, R: rank. Saved for the backward pass, in bytes a token in
16 bits: x, 2 H, once for all projections, and s, 2 R each. If ``source`` gives the input of the
norm that x is the result of, that input is saved in place of x, and the norm is computed again.
Dropout is a hash of a seed where Triton runs (``triton/dropout``), elsewhere a mask of H bytes for
each projection.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import LAYER_ADVICE, check_backward, rows_of, without_autocast
from liger_patch.kernels.lora.products import (
    b_gradient,
    base_gradients,
    columns_of,
    gradients_of_input_,
    joined_kept,
    products,
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
from liger_patch.kernels.rms_norm import NormInputs


class _LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        dtype: torch.dtype,
        source: NormInputs | None,
        fixed: list[Constants],
        adapters: list[Tensor],  # A of all as one, and each B, cast
        *tensors: Tensor | None,
    ):
        ctx.set_materialize_grads(False)
        bases, (a, *bs) = bases_of(tensors), adapters
        parts = restored(fixed, bases, a, bs)
        with without_autocast(x.device.type):
            rows = rows_of(x).to(dtype)
            s, kept = thin_products(rows, a, parts)
            ys = products(rows, parts, columns_of(s, parts), x.shape[:-1])
        ctx.fixed, ctx.dtype, ctx.shape = fixed, x.dtype, x.shape
        ctx.seeds, masks = split_kept(kept)
        ctx.source, ctx.product_dtype = None, dtype
        norm_weight = None
        if source is not None:
            rows, norm_weight = source.x, source.weight
            ctx.source = source[2:]
        ctx.save_for_backward(rows, norm_weight, s, a, *bs, *masks, *bases)
        return tuple(ys)

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):
        check_backward("lora_linears", *upstream, advice=LAYER_ADVICE)
        fixed, number = ctx.fixed, len(ctx.fixed)
        x, norm_weight, s, a, *tensors = ctx.saved_tensors
        bs, masks, bases = tensors[:number], tensors[number : 2 * number], tensors[2 * number :]
        wants_x, _, _, _, _, *wanted = ctx.needs_input_grad
        if all([dy is None for dy in upstream]):
            return (None,) * len(ctx.needs_input_grad)
        if ctx.source is not None:
            x = rows_of(NormInputs(x, norm_weight, *ctx.source).norm()).to(ctx.product_dtype)
        upstream = tuple(
            [None if dy is None else dy.reshape(len(s), dy.shape[-1]) for dy in upstream]
        )
        kept, parts = joined_kept(ctx.seeds, masks), restored(fixed, bases, a, bs)
        gradients: list[Tensor | None] = []
        with without_autocast(x.device.type):
            ds = upstream_thin_products(upstream, parts)
            dtypes = a_dtypes(fixed, wanted[2::4])
            dx = ds.new_empty(x.shape, dtype=ctx.dtype) if wants_x else None
            das = gradients_of_input_(dx, x, a, upstream, parts, ds, kept, dtypes)
            each = zip(upstream, parts, columns_of(s, parts), strict=True)
            for i, (dy, part, thin) in enumerate(each):
                if dy is None:
                    gradients += [None] * 4
                    continue
                *wants_base, _, wants_b = wanted[4 * i : 4 * i + 4]
                base = base_gradients(dy, x, part, wants_base) if any(wants_base) else (None, None)
                db = b_gradient(dy, part, thin, fixed[i].b_dtype) if wants_b else None
                gradients += [*base, das[i], db]
        return None if dx is None else dx.view(ctx.shape), None, None, None, None, *gradients


def lora_linears(x: Tensor, projections: Sequence[LoraProjection]) -> tuple[Tensor, ...]:
    """Compute several linear layers with LoRA adapters of the same input.

    Under autocast the products run in the autocast dtype, as those of
    ``torch.nn.functional.linear`` do. Each gradient has its input's dtype.

    Args:
        x: (..., H), floating point.
        projections: of x, each with its own O and R.

    Returns:
        (..., O) of each projection, in the dtype of the products.

    Raises:
        ValueError: shapes, dtypes, devices or values that do not fit.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    dtype = products_dtype(x)
    for i, projection in enumerate(projections):
        check_projection(f"projections[{i}]", projection, x.shape[-1], x, dtype)
    return run_lora_linears(x, projections, dtype, None)


def run_lora_linears(
    x: Tensor,
    projections: Sequence[LoraProjection],
    dtype: torch.dtype,
    source: NormInputs | None,
) -> tuple[Tensor, ...]:
    """Compute what ``lora_linears`` does, of arguments that fit, with products in a dtype.

    Args:
        source: the inputs of the norm that gave x. They are kept in place of x, which is computed
            again in the backward pass. None keeps x.
    """
    fixed, tensors = flattened(projections)
    matrices: list[Any] = [tensors[2::4], *zip(tensors[3::4])]  # A of all as one, and each B
    adapters = cast_matrices(matrices, dtype)
    return _LoraLinears.apply(x, dtype, source, fixed, adapters, *tensors)
