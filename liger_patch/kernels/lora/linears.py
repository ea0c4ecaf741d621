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

import torch
from torch import Tensor

from liger_patch.kernels.backend import LAYER_ADVICE, check_backward, rows_of, without_autocast
from liger_patch.kernels.lora.products import (
    b_gradients,
    base_gradients,
    columns_of,
    gradients_of_input_,
    products,
    thin_products,
    upstream_thin_products,
)
from liger_patch.kernels.lora.projection import (
    Constants,
    LoraProjection,
    cast_adapters,
    flattened,
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
        cast: tuple[Tensor, list[LoraProjection]],  # A of all as one; projections, A and B cast
        *tensors: Tensor | None,
    ):
        a, parts = cast
        ctx.set_materialize_grads(False)
        with without_autocast(x.device.type):
            rows = rows_of(x).to(dtype)
            s, kept = thin_products(rows, a, parts)
            ys = products(rows, parts, columns_of(s, parts), x.shape[:-1])
        ctx.fixed, ctx.dtype, ctx.shape = fixed, x.dtype, x.shape
        ctx.dtypes = [None if each is None else each.dtype for each in tensors]
        ctx.source, ctx.product_dtype = None, dtype
        norm_weight = None
        if source is not None:
            rows, norm_weight = source.x, source.weight
            ctx.source = source[2:]
        bs, bases = [part.b for part in parts], (*tensors[0::4], *tensors[1::4])
        ctx.save_for_backward(rows, norm_weight, s, a, *bs, *kept, *bases)
        return tuple(ys)

    @staticmethod
    def backward(ctx, *upstream: Tensor | None):
        check_backward("lora_linears", *upstream, advice=LAYER_ADVICE)
        fixed, number = ctx.fixed, len(ctx.fixed)
        wants_x, _, _, _, _, *wanted = ctx.needs_input_grad
        if all([dy is None for dy in upstream]):
            return (None,) * len(ctx.needs_input_grad)
        x, norm_weight, s, a, *tensors = ctx.saved_tensors
        bs, kept, bases = tensors[:number], tensors[number : 2 * number], tensors[2 * number :]
        if ctx.source is not None:
            x = rows_of(NormInputs(x, norm_weight, *ctx.source).norm()).to(ctx.product_dtype)
        dys = [None if dy is None else dy.reshape(s.shape[0], dy.shape[-1]) for dy in upstream]
        parts = restored(fixed, bases[:number], bases[number:], a, bs)
        dtypes = [each if w else None for each, w in zip(ctx.dtypes, wanted, strict=True)]
        gradients: list[Tensor | None] = []
        with without_autocast(x.device.type):
            ds = upstream_thin_products(dys, parts, s)
            dx = ds.new_empty(x.shape, dtype=ctx.dtype) if wants_x else None
            das = gradients_of_input_(dx, x, a, dys, parts, ds, kept, dtypes[2::4])
            dbs = b_gradients(dys, parts, s, dtypes[3::4])
            for i, (dy, part, da, db) in enumerate(zip(dys, parts, das, dbs, strict=True)):
                base, wants_base = (None, None), wanted[4 * i : 4 * i + 2]
                if dy is not None and any(wants_base):
                    base = base_gradients(dy, x, part, wants_base)
                gradients += [*base, None if dy is None else da, db]
        return None if dx is None else dx.view(ctx.shape), *[None] * 4, *gradients


def run_lora_linears(
    x: Tensor,
    projections: Sequence[LoraProjection],
    dtype: torch.dtype,
    source: NormInputs | None,
) -> tuple[Tensor, ...]:
    """Compute several linear layers with LoRA adapters of the same input, of arguments that fit.

    Args:
        x: (..., H), floating point.
        projections: of x, each with its own O and R.
        dtype: of the products, as autocast has it; that of all tensors outside autocast.
        source: the inputs of the norm that gave x. They are kept in place of x, which is computed
            again in the backward pass. None keeps x.

    Returns:
        (..., O) of each projection, in the dtype of the products. Each gradient has its input's
        dtype.

    Raises:
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    fixed, tensors = flattened(projections)
    (cast,) = cast_adapters([projections], dtype)
    return _LoraLinears.apply(x, dtype, source, fixed, cast, *tensors)
