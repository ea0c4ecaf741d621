"""A gated feed-forward layer (arXiv:2002.05202), with LoRA adapters or without, that computes its
activation again instead of keeping it. The formulas are in ``lora/mlp``.

H: hidden size, I: intermediate size, O: size of y, mostly H, R: rank, N: tokens. What is kept, in
bytes a token in 16 bits:

- without adapters: gate and up, 4 I, and x, 2 H, where a weight of the first two products trains.
  Three linear layers keep a too, 2 I, where Wd trains. Extra memory of the backward pass: da, dgate
  and dup, 6 I a token, and the gradients of all three weights at once, 6 H I;
- with adapters: x, the bases' gate and up, 2 H + 4 I, the thin S and Sd, and a where Wd trains;
- in slices of tokens, for long rows under gradient checkpointing: x alone, 2 H.

Gradient checkpointing computes a layer again up to its last saved tensor. With adapters and in
slices the work is therefore shared by two functions:

    x -> link      keeps tensors, and computes every gradient
    link -> y      keeps nothing, so it is not computed again; the gradient of link is that of y

``link`` has the shape of y and no memory. In slices, the first function keeps x and computes no
product; the backward pass computes gate and up again, once. So there are as many matrix products as
with ordinary checkpointing. The exception: if something behind the layer keeps its own input (the
norm that Gemma puts there), y is computed once more.

Extra memory in slices, in bytes: forward y, 2 N O; backward dx, 2 N H; in both what a slice takes,
and the weights as products take them, 6 H I, where they are cast or quantized: once for all slices.
Gradients of parameters are summed over the slices in float32, and rounded once. Dropout has a seed
for each slice and projection.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from liger_patch.kernels.backend import LAYER_ADVICE, check_backward, rows_of, without_autocast
from liger_patch.kernels.chunk_sizes import slices_of
from liger_patch.kernels.lora.mlp import FIELDS, GatedLayer, Gates, Gradients, Parts
from liger_patch.kernels.lora.products import new_seed, products, serves_lora
from liger_patch.kernels.lora.projection import LoraProjection, flattened

Seeds = list[Tensor | None]  # of what the adapters of gate, up and down drop


class _AtOnce(torch.autograd.Function):
    """x to y; with adapters to link, a and Sd."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # (..., H)
        layer: GatedLayer,
        parts: Parts,  # with adapters cast
        *parameters: Tensor | None,
    ):
        wants_x, _, _, *wanted = ctx.needs_input_grad
        rows, last, adapters = rows_of(x).to(layer.dtype), len(parameters) - FIELDS, []
        if parts.a is not None:
            adapters = [parts.a, *[each.b for each in parts.first], parts.down.a, parts.down.b]
        gates = layer.first_products(rows, parts)
        layer.activate(gates, parts)
        a, s_down, size = gates.a, gates.s_down, parts.down.weight.shape[0]
        ctx.layer, ctx.dtype, ctx.shape = layer, x.dtype, x.shape
        ctx.dtypes = [None if each is None else each.dtype for each in parameters]
        trains_first = any(wanted[0:last:FIELDS])
        is_last_alone = adapters and not (wants_x or any(wanted[:last]) or wanted[last + 2])
        first_weights = parameters[0:last:FIELDS]
        tensors = [
            rows if (adapters and not is_last_alone) or trains_first else None,
            *([None] * 3 if is_last_alone else (gates.gate, gates.up, gates.s)),
            a if adapters and wanted[last] else None,
            s_down,
            *(first_weights if wants_x else [None] * len(first_weights)),
            parameters[last],
            *parameters[1::FIELDS],
            *adapters,
            *([None] * len(gates.kept) if is_last_alone else gates.kept),
        ]
        ctx.save_for_backward(*tensors)
        if not adapters:
            return products(a, (parts.down,), (None,), x.shape[:-1])[0]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(a, s_down)
        return rows.new_empty(()).expand(*x.shape[:-1], size), a, s_down

    @staticmethod
    def backward(ctx, dy: Tensor | None, *_: None):
        check_backward("gated_mlp", dy, advice=LAYER_ADVICE)
        x, gate, up, s, a, s_down, *tensors = ctx.saved_tensors
        layer: GatedLayer = ctx.layer
        wants_x, _, _, *wanted = ctx.needs_input_grad
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        number = 2 * len(layer.fixed)
        bases, rest = tensors[:number], tensors[number:]
        adapters = rest and rest[: len(layer.fixed) + 2]
        gates = Gates(gate, up, s, a, s_down, rest[len(adapters) :])
        del gate, up, a, tensors
        sums, dy = Gradients(ctx.dtypes, wanted), rows_of(dy).contiguous()
        with without_autocast(dy.device.type):
            dtype, parts = ctx.dtype if wants_x else None, layer.restored(bases, adapters)
            dx = layer.gradients_(dtype, dy, x, parts, gates, sums)
        return None if dx is None else dx.view(ctx.shape), None, None, *sums.found


class _InSlices(torch.autograd.Function):
    """x to link: keeps x."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # (..., H)
        layer: GatedLayer,
        slices: list[tuple[int, int]],
        seeds: list[Seeds],  # of each slice
        *parameters: Tensor | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.how, ctx.dtype, ctx.shape = (layer, slices, seeds), x.dtype, x.shape
        ctx.save_for_backward(x.to(layer.dtype), *parameters)
        size = layer.out_features(parameters)
        return x.new_empty((), dtype=layer.dtype).expand(*x.shape[:-1], size)

    @staticmethod
    def backward(ctx, dy: Tensor | None):
        check_backward("gated_mlp", dy, advice=LAYER_ADVICE)
        x, *parameters = ctx.saved_tensors
        layer, slices, all_seeds = ctx.how
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        wants_x, _, _, _, *wanted = ctx.needs_input_grad
        dtypes = [None if each is None else each.dtype for each in parameters]
        sums, x, dy = Gradients(dtypes, wanted, in_slices=True), rows_of(x), rows_of(dy)
        dx = x.new_empty(x.shape, dtype=ctx.dtype) if wants_x else None
        with without_autocast(x.device.type):
            parts = layer.prepared(parameters)
            for (start, stop), seeds in zip(slices, all_seeds, strict=True):
                rows = x[start:stop]
                gates = layer.first_products(rows, parts, seeds[:-1])
                if parts.a is not None:
                    layer.activate(gates, parts, seeds[-1])
                part = None if dx is None else dx[start:stop]
                layer.gradients_(part, dy[start:stop].contiguous(), rows, parts, gates, sums)
        dx = None if dx is None else dx.view(ctx.shape)
        return dx, None, None, None, *sums.rounded(parameters)


class Result(torch.autograd.Function):
    """link to y, which ``compute`` returns: keeps nothing, and gives link the gradient of y."""

    @staticmethod
    def forward(ctx, link: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    @staticmethod
    def backward(ctx, dy: Tensor):
        return dy, None


def _result_of_slices(
    x: Tensor,  # (..., H)
    layer: GatedLayer,
    slices: list[tuple[int, int]],
    seeds: list[Seeds],
    parameters: Sequence[Tensor | None],
) -> Tensor:
    rows, parts = rows_of(x), layer.prepared(parameters)
    # in its own shape: autograd would refuse to change a view in place
    y = x.new_empty(*x.shape[:-1], parts.down.weight.shape[0], dtype=layer.dtype)
    filled = y.view(len(rows), y.shape[-1])
    for (start, stop), each in zip(slices, seeds, strict=True):
        gates = layer.first_products(rows[start:stop].to(layer.dtype), parts, each[:-1])
        layer.activate(gates, parts, each[-1])
        gates.gate = gates.up = None
        (filled[start:stop],) = products(gates.a, (parts.down,), (gates.s_down,), (stop - start,))
    return y


def run_gated_mlp(
    x: Tensor,
    gate: LoraProjection,
    up: LoraProjection | None,
    down: LoraProjection,
    dtype: torch.dtype,
    activation: str,
    slice_tokens: int | None,
) -> Tensor:
    """Compute ``down(act(gate(x)) * up(x))``, keeping neither the activation nor its product, of
    arguments that fit.

    Args:
        x: (..., H), floating point.
        gate, up: projections of H features to I. Without ``up``, ``gate`` gives 2 I features: the
            one, then the other.
        down: a projection of I features to O, which is mostly H. All of the projections have
            adapters, or none has one; without ``up`` none has one.
        dtype: of the products, as autocast has it; that of all tensors outside autocast.
        activation: "silu", "gelu_tanh" or "gelu".
        slice_tokens: the tokens of a slice. Both passes then run slice by slice, only x is kept,
            and the backward pass computes the first two products again. It is meant for gradient
            checkpointing, which then need not compute them again. None, and dropout with masks that
            are tensors: all tokens at once.

    Returns:
        (..., O), in the dtype of the products. Each gradient has its input's dtype.

    Raises:
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    projections = [gate, down] if up is None else [gate, up, down]
    fixed, parameters = flattened(projections)
    layer = GatedLayer(fixed, dtype, activation)
    if slice_tokens is not None and _can_slice(x, dtype, projections):
        slices = slices_of(x, slice_tokens)
        seeds = [[new_seed() if each.dropout else None for each in fixed] for _ in slices]
        how = layer, slices, seeds
        link = _InSlices.apply(x, *how, *parameters)
        with without_autocast(x.device.type):
            return Result.apply(link, lambda: _result_of_slices(x, *how, parameters))
    if down.a is None:
        cast = [None if each is None else each.to(dtype) for each in parameters]
        parts = layer.restored([*cast[0::FIELDS], *cast[1::FIELDS]], [])
        return _AtOnce.apply(x.to(dtype), layer, parts, *cast)
    parts = layer.cast(projections)
    with without_autocast(x.device.type):
        link, a, s_down = _AtOnce.apply(x, layer, parts, *parameters)
        return Result.apply(link, lambda: products(a, (parts.down,), (s_down,), x.shape[:-1])[0])


def _can_slice(x: Tensor, dtype: torch.dtype, parts: Sequence[LoraProjection]) -> bool:
    """Return False if dropout would need a mask as a tensor, which slices cannot make again."""
    if not any(part.dropout for part in parts):
        return True
    return serves_lora(x.new_empty(1, dtype=dtype), *(part.a for part in parts))
