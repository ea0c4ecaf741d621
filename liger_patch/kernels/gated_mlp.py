"""A gated feed-forward layer that computes its activation again instead of keeping it.

    gate = x Wg'        up = x Wu'        a = act(gate) * up        y = a Wd'

and with da = dy Wd, dgate and dup as in ``gated``:

    dWd = dy' a         dWg = dgate' x    dWu = dup' x              dx = dgate Wg + dup Wu

The kernel that makes dgate and dup of da has gate and up at hand, and leaves a in da's place. The
second product of dx is added to the first within the product: one rounding and one pass less than a
sum of two.

H: hidden size, I: intermediate size. Saved for the backward pass, in bytes a token in bf16: gate
and up, 4 I, and x, 2 H, which its maker mostly holds too; layer by layer it is 6 I, for a. Extra
memory of the backward pass: 6 I a token, as layer by layer where a is kept: da, dgate and dup.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear

from liger_patch.kernels.differentiation import LAYER_ADVICE, refuse_second_derivative
from liger_patch.kernels.gated import ACTIVATIONS, _gated, _gated_backward_and_result


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # (..., H)
        gate_weight: Tensor,  # (I, H), or (2 I, H) with that of up behind it
        up_weight: Tensor | None,  # (I, H)
        down_weight: Tensor,  # (H, I)
        activation: str,
    ) -> Tensor:
        gate = linear(x, gate_weight)
        up = None if up_weight is None else linear(x, up_weight)
        ctx.save_for_backward(x, gate, up, gate_weight, up_weight, down_weight)
        ctx.activation = activation
        return linear(_gated(gate, up, activation), down_weight)

    @staticmethod
    def backward(ctx, dy: Tensor):
        refuse_second_derivative("gated_mlp", LAYER_ADVICE)
        x, gate, up, gate_weight, up_weight, down_weight = ctx.saved_tensors
        wants_x, wants_gate, wants_up, wants_down, _ = ctx.needs_input_grad
        rows, dy = _rows(x), _rows(dy)
        a = dy @ down_weight  # da, until a takes its place
        gates = _rows(gate), None if up is None else _rows(up)
        dgate, dup = _gated_backward_and_result(a, *gates, ctx.activation)
        ddown_weight = dy.t() @ a if wants_down else None
        del a
        dx = None
        if wants_x:
            dx = dgate @ gate_weight
            if up is not None:
                dx.addmm_(dup, up_weight)
            dx = dx.view(x.shape)
        dgate_weight = dgate.t() @ rows if wants_gate else None
        dup_weight = dup.t() @ rows if wants_up else None
        return dx, dgate_weight, dup_weight, ddown_weight, None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def gated_mlp(
    x: Tensor,  # (..., H)
    gate_weight: Tensor,  # (I, H), or (2 I, H)
    up_weight: Tensor | None,  # (I, H)
    down_weight: Tensor,  # (H, I)
    *,
    activation: str = "silu",
) -> Tensor:
    """``(act(x Wg') * x Wu') Wd'``, saving ``x`` and the first two products.

    Under autocast the products run in the autocast dtype, as those of
    ``torch.nn.functional.linear`` do.

    Args:
        x: (..., H), floating point.
        gate_weight: (I, H); without ``up_weight`` (2 I, H), the rows of the one, then the other's.
        up_weight: (I, H), or None.
        down_weight: (H, I).
        activation: "silu" or "gelu_tanh".

    Returns:
        (..., H).

    Raises:
        ValueError: what does not fit.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"x must be floating point (..., H), got {x.dtype} {tuple(x.shape)}")
    hidden_size, size = x.shape[-1], down_weight.shape[-1] if down_weight.dim() else 0
    _check("down_weight", down_weight, (hidden_size, size), x)
    _check("gate_weight", gate_weight, ((2 if up_weight is None else 1) * size, hidden_size), x)
    x, gate_weight, down_weight = (_autocast(each) for each in (x, gate_weight, down_weight))
    if up_weight is not None:
        _check("up_weight", up_weight, (size, hidden_size), x)
        up_weight = _autocast(up_weight)
    weights = {"gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight}
    for name, weight in weights.items():
        if weight is not None and weight.dtype != x.dtype:
            raise ValueError(f"{name} must be {x.dtype} as x is, got {weight.dtype}")
    return _GatedMlp.apply(x, *weights.values(), activation)


def _check(name: str, weight: Tensor, shape: tuple[int, int], x: Tensor) -> None:
    if tuple(weight.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(weight.shape)}")
    if weight.device != x.device:
        raise ValueError(f"{name} must be on {x.device} as x is, got {weight.device}")


def _autocast(tensor: Tensor) -> Tensor:
    """In the dtype in which a product would run now."""
    device_type = tensor.device.type
    if tensor.is_meta or tensor.dtype == torch.float64:  # which autocast does not know, or cast
        return tensor
    if torch.is_autocast_enabled(device_type):
        return tensor.to(torch.get_autocast_dtype(device_type))
    return tensor
