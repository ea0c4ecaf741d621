"""A gated feed-forward layer (arXiv:2002.05202) that computes its activation again instead of
keeping it.

    gate = x Wg'        up = x Wu'        a = act(gate) * up        y = a Wd'

and with da = dy Wd, dgate and dup as in ``gated``:

    dWd = dy' a         dWg = dgate' x    dWu = dup' x              dx = dgate Wg + dup Wu

The kernel that makes dgate and dup of da has gate and up at hand, and leaves a in da's place. The
second product of dx is added to the first within the product: one rounding and one pass less than a
sum of two.

H: hidden size, I: intermediate size, O: size of y, mostly H. Saved for the backward pass, in bytes
a token in bf16: gate and up, 4 I, and x, 2 H, where a weight of the first two products trains;
three linear layers save a too, 2 I, where Wd trains. Extra memory of the backward pass: da, dgate
and dup, 6 I a token, and the gradients of all three weights at once, 6 H I. In slices
(``kernels/sliced``): x is saved, 2 H, and gate and up are computed again.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from liger_patch.kernels.backend import (
    LAYER_ADVICE,
    autocast_dtype,
    check_backward,
    without_autocast,
)
from liger_patch.kernels.gated import ACTIVATIONS, gated_backward, gated_backward_, gated_forward
from liger_patch.kernels.product import product_
from liger_patch.kernels.quantized_weight import QuantizedWeight
from liger_patch.kernels.rows import rows_of
from liger_patch.kernels.sliced import Sums, check_slice_tokens, run_sliced, slices_of


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # (..., H)
        gate_weight: Tensor,  # (I, H), or (2 I, H) with that of up behind it
        up_weight: Tensor | None,  # (I, H)
        down_weight: Tensor,  # (O, I)
        activation: str,
    ) -> Tensor:
        gate = linear(x, gate_weight)
        up = None if up_weight is None else linear(x, up_weight)
        wants_x, wants_gate, wants_up, *_ = ctx.needs_input_grad
        weights = (gate_weight, up_weight) if wants_x else (None, None)
        ctx.save_for_backward(
            x if wants_gate or wants_up else None, gate, up, *weights, down_weight
        )
        ctx.activation = activation
        return linear(gated_forward(gate, up, activation), down_weight)

    @staticmethod
    def backward(ctx, dy: Tensor):
        check_backward("gated_mlp", dy, advice=LAYER_ADVICE)
        gradients = partial(_gradients, dy, *ctx.saved_tensors, ctx.activation)
        wanted = ctx.needs_input_grad[:4]
        with without_autocast(dy.device.type):
            return *gradients(wanted), None


def _gradients(
    dy: Tensor,  # (..., O)
    x: Tensor | None,  # (..., H); None if no weight of the first products trains
    gate: Tensor,  # (..., I), or (..., 2 I) with up behind it
    up: Tensor | None,  # (..., I)
    gate_weight: Tensor | None,  # (I, H), or (2 I, H); None, as up's, if x wants no gradient
    up_weight: Tensor | None,  # (I, H)
    down_weight: Tensor,  # (O, I)
    activation: str,
    wanted: tuple[bool, bool, bool, bool],  # of x and of each weight
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x and of each weight; None where it is not wanted."""
    _, wants_gate, wants_up, wants_down = wanted
    shape, dy = dy.shape[:-1], rows_of(dy)
    da = dy @ down_weight
    backward = gated_backward_ if wants_down else gated_backward
    dgate, dup = backward(da, rows_of(gate), None if up is None else rows_of(up), activation)
    ddown_weight = dy.t() @ da if wants_down else None  # a has taken its place
    del da
    dx = dgate_weight = dup_weight = None
    if gate_weight is not None:
        dx = dgate @ gate_weight
        if up_weight is not None:
            dx.addmm_(dup, up_weight)
        dx = dx.view(*shape, gate_weight.shape[1])
    if x is not None:
        x = rows_of(x)
        dgate_weight = dgate.t() @ x if wants_gate else None
        dup_weight = dup.t() @ x if wants_up else None
    return dx, dgate_weight, dup_weight, ddown_weight


class _Slices:
    """The layer as ``kernels/sliced`` runs it; weights in the order of ``gated_mlp``."""

    name = "gated_mlp"

    def __init__(
        self,
        activation: str,
        dtype: torch.dtype,
        out_features: int,
        quantized: Sequence[QuantizedWeight | None],
    ) -> None:
        self.activation, self.dtype, self.out_features = activation, dtype, out_features
        self._quantized = quantized

    def prepare(self, parameters: Sequence[Tensor | None]) -> Any:
        weights: list[Tensor | None] = []
        for dense, quantized in zip(parameters, self._quantized, strict=True):
            if quantized is not None:
                dense = quantized.rows(0, quantized.shape[0])
            weights.append(None if dense is None else dense.to(self.dtype))
        return weights

    def forward(self, shared: Any, x: Tensor, i: int) -> Tensor:
        *weights, down_weight = shared
        gate, up = self._products(x, *weights)
        a = gated_forward(gate, up, self.activation)
        del gate, up
        return linear(a, down_weight)

    def backward(
        self, shared: Any, x: Tensor, dy: Tensor, dx: Tensor | None, sums: Sums, i: int
    ) -> None:
        gate_weight, up_weight, down_weight = shared
        gate, up = self._products(x, gate_weight, up_weight)
        da = dy @ down_weight
        backward = gated_backward_ if sums.wants(2) else gated_backward
        dgate, dup = backward(da, gate, up, self.activation)
        del gate, up
        sums.add_product(2, dy.t(), da)  # a has taken its place
        del da
        sums.add_product(0, dgate.t(), x)
        sums.add_product(1, dup.t(), x)
        if dx is not None:
            product_(dx, dgate, gate_weight)
            if up_weight is not None:
                product_(dx, dup, up_weight, add=True)

    def _products(
        self, x: Tensor, gate_weight: Tensor, up_weight: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return linear(x, gate_weight), None if up_weight is None else linear(x, up_weight)


def gated_mlp(
    x: Tensor,  # (..., H)
    gate_weight: Tensor | QuantizedWeight,  # (I, H), or (2 I, H)
    up_weight: Tensor | QuantizedWeight | None,  # (I, H)
    down_weight: Tensor | QuantizedWeight,  # (O, I)
    *,
    activation: str = "silu",
    slice_tokens: int | None = None,
) -> Tensor:
    """Compute ``(act(x Wg') * x Wu') Wd'``, saving the first two products and not their activation.

    Under autocast the products run in the autocast dtype, as those of
    ``torch.nn.functional.linear`` do.

    Args:
        x: (..., H), floating point.
        gate_weight: (I, H); without ``up_weight`` (2 I, H), the rows of the one, then the other's.
        up_weight: (I, H), or None.
        down_weight: (O, I); O is mostly H.
        activation: "silu", "gelu_tanh" or "gelu".
        slice_tokens: saves ``x`` alone, and runs over slices of so many tokens, forward and
            backward, which computes the first two products again: for gradient checkpointing,
            which then does not. Then weights may be quantized. None: all at once.

    Returns:
        (..., O), of the dtype of ``x``, or autocast's.

    Raises:
        ValueError: what does not fit.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    if len(gate_weight.shape) != 2:
        raise ValueError(f"gate_weight must be (I, H), got {tuple(gate_weight.shape)}")
    size, hidden_size = gate_weight.shape
    if x.dim() == 0 or x.shape[-1] != hidden_size or not x.is_floating_point():
        expected, given = f"(..., {hidden_size})", f"{x.dtype} {tuple(x.shape)}"
        raise ValueError(f"x must be floating point {expected}, as gate_weight is, got {given}")
    if up_weight is None and size % 2:
        raise ValueError(
            f"gate_weight without up_weight must be (2 I, H), got {(size, hidden_size)}"
        )
    if up_weight is not None and up_weight.shape != gate_weight.shape:
        expected, given = (size, hidden_size), tuple(up_weight.shape)
        raise ValueError(f"up_weight must have shape {expected}, got {given}")
    size = size // 2 if up_weight is None else size
    if len(down_weight.shape) != 2 or down_weight.shape[1] != size:
        raise ValueError(f"down_weight must be (O, {size}), got {tuple(down_weight.shape)}")
    check_slice_tokens(slice_tokens)
    dtype = _product_dtype(x)
    weights = {"gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight}
    for name, weight in weights.items():
        if weight is not None and weight.device != x.device:
            raise ValueError(f"{name} must be on {x.device} as x is, got {weight.device}")
        if weight is not None and _product_dtype(weight) != dtype:
            raise ValueError(f"{name} must be {dtype} as x is, got {weight.dtype}")
    dense = [each if isinstance(each, Tensor) else None for each in weights.values()]
    if slice_tokens is not None:
        quantized = [None if isinstance(each, Tensor) else each for each in weights.values()]
        layer = _Slices(activation, dtype, down_weight.shape[0], quantized)
        return run_sliced(layer, x, dense, slices_of(x, slice_tokens))
    for name, weight in weights.items():
        if weight is not None and not isinstance(weight, Tensor):
            raise ValueError(f"{name} must be a tensor without slice_tokens, got a quantized one")
    cast = [None if each is None else each.to(dtype) for each in dense]
    return _GatedMlp.apply(x.to(dtype), *cast, activation)


def _product_dtype(tensor: Tensor | QuantizedWeight) -> torch.dtype:
    """Return the dtype in which a product of the weight, or of x, would run now."""
    if not isinstance(tensor, Tensor):
        return tensor.dtype
    return autocast_dtype(tensor.device.type, tensor.dtype) or tensor.dtype
