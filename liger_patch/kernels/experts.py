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

N: tokens, H: hidden size, I: intermediate size, E: experts, R: ranks; in shapes, S = N K. Kept for
the backward pass, in bytes a token in 16 bits: x, 2 H, and K times gate and up, 4 I, and the thin S
and D, 2 R each. Extra memory of the backward pass: 2 H + 6 I a slot.

As with ``gated_mlp``, two functions share the work: gradient checkpointing computes the first one
again, which ends before the product with W2. Long rows under gradient checkpointing run in slices
of tokens: then x, the routing and nothing else are kept, the backward pass computes each slice
again, and gradients of parameters are summed in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    LAYER_ADVICE,
    accumulation_dtype,
    check_backward,
    without_autocast,
)
from liger_patch.kernels.chunk_sizes import slices_of
from liger_patch.kernels.expert_parameters import FIELDS, Given, Layer
from liger_patch.kernels.expert_steps import (
    ALIGNMENT,
    Activation,
    ExpertProjection,
    Order,
    add_thin_,
    gated,
    gated_backward_,
    gathered,
    grouped_outer,
    grouped_product,
    order_from,
    order_of,
    sum_slots_,
)
from liger_patch.kernels.gated_mlp import Result


def _first_products(
    x: Tensor, first: ExpertProjection, last: ExpertProjection, order: Order, layer: Layer
) -> tuple[Tensor, Tensor, Any, Any]:
    """Return h, gate and up without bias and adapter, S, and D."""
    rows, thin = gathered(x, order, first.a)
    gate_up = grouped_product(rows, first.dense(layer.dtype), order.offsets)
    del rows
    h, down_thin = gated(gate_up, first, thin, last, order, layer.how)
    return h, gate_up, thin, down_thin


def _result_(
    y: Tensor, h: Tensor, thin: Any, last: ExpertProjection, weights: Tensor, order: Order
) -> Tensor:
    """Write the experts' result (N, H), and return it."""
    slots = grouped_product(h, last.dense(h.dtype), order.offsets)
    if thin is not None:
        add_thin_(slots, thin, last.b, order)
    return sum_slots_(y, slots, order, weights, last.bias)


def _gradients(
    dy: Tensor,  # (N, H)
    x: Tensor,
    weights: Tensor,
    order: Order,
    first: ExpertProjection,
    last: ExpertProjection,
    kept: list[Any],  # gate and up, S and D; emptied, to free them
    layer: Layer,
    wanted: Sequence[bool],  # of the weights, and of both projections' parameters
    dx: Tensor | None,  # to be written
) -> tuple[Tensor | None, list[Any]]:
    """Return the gradient of the weights (N, K), and those of the parameters, of padded ranks and
    without scaling.
    """
    (gate_up, thin, down_thin), offsets, dtype = kept, order.offsets, layer.dtype
    kept.clear()
    wants_weights, *wanted = wanted
    found: list[Any] = [None] * len(wanted)
    adapter = None if last.b is None else last.b.transpose(1, 2)
    upstream, ddown_thin = gathered(dy.to(dtype), order, adapter)  # (S, H)
    dh = grouped_product(upstream, last.dense(dtype).transpose(1, 2), offsets)
    bias = last.bias if wants_weights else None
    of_weights = weights.dtype if bias is None else accumulation_dtype(dtype)
    dgate_up, dthin, dweights, weighted = gated_backward_(
        dh, gate_up, first, thin, last, down_thin, ddown_thin, weights, order, layer.how, of_weights
    )
    h = dh  # times the weights
    del dh, gate_up
    if wanted[4]:
        found[4] = _weight_gradient(h, upstream, last.weight, offsets)
    if wanted[5]:
        sorted_weights = weights.view(-1)[order.slots][:, None]
        found[5] = _sums((upstream * sorted_weights).to(dtype), offsets)
    if wanted[6]:
        found[6] = grouped_outer(ddown_thin, h, offsets)
    if wanted[7]:
        found[7] = grouped_outer(upstream, weighted, offsets)
    if bias is not None:
        of_bias = dy.to(of_weights) @ bias.to(of_weights).t()  # (N, E)
        dweights = dweights + of_bias.gather(1, order.index)
    del h, upstream, ddown_thin
    if wanted[0] or wanted[2]:
        rows, _ = gathered(x, order, None)
        if wanted[0]:
            found[0] = _weight_gradient(rows, dgate_up, first.weight, offsets)
        if wanted[2]:
            found[2] = grouped_outer(dthin, rows, offsets)
        del rows
    if wanted[1]:
        found[1] = _sums(dgate_up, offsets)
    if wanted[3]:
        found[3] = grouped_outer(dgate_up, thin, offsets)
    if dx is not None:
        drows = grouped_product(dgate_up, first.dense(dtype).transpose(1, 2), offsets)
        del dgate_up
        if dthin is not None:
            add_thin_(drows, dthin, first.a.transpose(1, 2), order)
        sum_slots_(dx, drows, order, None, None)
    return dweights.to(weights.dtype) if wants_weights else None, found


class _AtOnce(torch.autograd.Function):
    """x to link, h and D: keeps what the backward pass needs, and computes every gradient."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # (N, H)
        weights: Tensor,  # (N, K)
        order: Order,
        layer: Layer,
        adapters: Tensor | None,
        projections: list[ExpertProjection],  # of the next arguments
        *parameters: Tensor | None,
    ):
        ctx.layer, ctx.given = layer, [Given.like(each) for each in parameters]
        first, last = projections
        h, *kept = _first_products(x, first, last, order, layer)
        index = None if first.bias is None and last.bias is None else order.index
        made = x, weights, order.numbers, index, *kept, adapters
        ctx.save_for_backward(*made, *parameters[:2], *parameters[FIELDS : FIELDS + 2])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(each for each in (h, kept[-1]) if each is not None))
        return x.new_empty(()).expand(x.shape), h, kept[-1]

    @staticmethod
    def backward(ctx, dy: Tensor | None, *_: None):
        check_backward("experts", dy, advice=LAYER_ADVICE)
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        *saved, first_weight, first_bias, last_weight, last_bias = ctx.saved_tensors
        # hooks may give them back in other strides
        made: list[Any] = [each if each is None else each.contiguous() for each in saved]
        x, weights, numbers, index, *kept, adapters = made
        del saved, made
        layer, given = ctx.layer, ctx.given
        wants_x, wants_weights, _, _, _, _, *wanted = ctx.needs_input_grad
        with without_autocast(dy.device.type):
            parameters = first_weight, first_bias, None, None, last_weight, last_bias, None, None
            first, last = layer.projections(parameters, adapters, given)
            dx = torch.empty_like(x) if wants_x else None
            order = order_from(numbers, weights.shape, index)
            dw, found = _gradients(
                dy, x, weights, order, first, last, kept, layer, (wants_weights, *wanted), dx
            )
            for i, each in enumerate(found):
                if each is not None:
                    found[i] = given[i].times(each, layer.factor(i))
        return dx, dw, None, None, None, None, *found


class _InSlices(torch.autograd.Function):
    """x to link: keeps x and its routing."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # (N, H)
        weights: Tensor,  # (N, K)
        index: Tensor,  # (N, K)
        layer: Layer,
        slices: list[tuple[int, int]],
        *parameters: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.slices = layer, slices
        ctx.save_for_backward(x, weights, index, *parameters)
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx, dy: Tensor | None):
        check_backward("experts", dy, advice=LAYER_ADVICE)
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        x, weights, index, *parameters = ctx.saved_tensors
        layer, x = ctx.layer, x.contiguous()
        wants_x, wants_weights, _, _, _, *wanted = ctx.needs_input_grad
        given: list[Any] = [Given.like(each) for each in parameters]
        totals: list[Any] = [None] * len(given)
        dx = torch.empty_like(x) if wants_x else None
        dw: Any = torch.empty_like(weights) if wants_weights else None
        with without_autocast(x.device.type):
            first, last = layer.prepared(parameters)
            for start, stop in ctx.slices:
                order = order_of(index[start:stop], first.weight.shape[0])
                rows, own_weights = x[start:stop], weights[start:stop].contiguous()
                kept = [*_first_products(rows, first, last, order, layer)[1:]]
                own_dw, found = _gradients(
                    dy[start:stop], rows, own_weights, order, first, last, kept, layer,
                    (wants_weights, *wanted), None if dx is None else dx[start:stop],
                )  # fmt: skip
                if dw is not None:
                    dw[start:stop] = own_dw
                for i, like in enumerate(given):
                    own, found[i] = found[i], None  # freed before the next slice
                    if own is not None:
                        totals[i] = like.added(totals[i], own, layer.factor(i))
                    del own
        for i, each in enumerate(totals):
            if each is not None:
                totals[i] = each.to(given[i].dtype)
        return dx, dw, None, None, None, *totals


def _weight_gradient(x: Tensor, dy: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Return dW (E, in, out), in memory as the weight lies."""
    if weight.stride(2) == 1:
        return grouped_outer(x, dy, offsets)
    return grouped_outer(dy, x, offsets).transpose(1, 2)


def _sums(rows: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of each expert's rows (E, out)."""
    ones = rows.new_ones(len(rows), ALIGNMENT)
    return grouped_outer(ones, rows, offsets)[:, 0]


def run_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    first: ExpertProjection,
    last: ExpertProjection,
    activation: Activation,
    dtype: torch.dtype,
    slice_tokens: int | None = None,
) -> Tensor:
    """Compute the sum of K weighted feed-forward layers for each token, of arguments that fit.

    Args:
        x: (N, H), floating point.
        index: (N, K), integers in [0, E): the experts of each token.
        weights: (N, K): the factor of each expert's result.
        first: H features to gate and up, 2 I.
        last: I features to H.
        activation: what is computed between the two.
        dtype: of the products, as autocast has it.
        slice_tokens: the tokens of a slice, as of ``gated_mlp``; None for all tokens at once.

    Returns:
        (N, H) in the dtype of x. Each gradient has its input's dtype.

    Raises:
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    held = [None if isinstance(p.weight, Tensor) else p.weight for p in (first, last)]
    layer = Layer(activation, (first.scaling, last.scaling), dtype, held)
    parameters = [*first[:FIELDS], *last[:FIELDS]]
    for i, each in zip((0, FIELDS), held, strict=True):
        parameters[i] = parameters[i] if each is None else None
    count, y_dtype = first.weight.shape[0], x.dtype
    with without_autocast(x.device.type):
        x, weights = x.to(dtype), weights.contiguous()
        if slice_tokens is not None and len(x) > slice_tokens:
            slices = slices_of(x, slice_tokens)
            link = _InSlices.apply(x, weights, index, layer, slices, *parameters)

            def result() -> Tensor:
                y, (first, last) = x.new_empty(x.shape), layer.prepared(parameters)
                for start, stop in slices:
                    order = order_of(index[start:stop], count)
                    h, _, _, thin = _first_products(x[start:stop], first, last, order, layer)
                    _result_(y[start:stop], h, thin, last, weights[start:stop], order)
                return y

        else:
            order = order_of(index, count)
            with torch.no_grad():
                adapters = layer.cast_adapters(parameters)
                parts = layer.projections(parameters, adapters)
            how = order, layer, adapters, parts
            link, h, thin = _AtOnce.apply(x, weights, *how, *parameters)

            def result() -> Tensor:
                return _result_(x.new_empty(x.shape), h, thin, parts[1], weights, order)

        return Result.apply(link, result).to(y_dtype)
