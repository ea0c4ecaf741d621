"""The gated activation of a feed-forward layer: SwiGLU and GeGLU (arXiv:2002.05202).

    y = act(gate) * up          act = silu, or gelu in its tanh form

in float32 (float64 for float64), rounded once. Saved for the backward pass: gate and up, nothing
beside: 2 I elements a token for I the intermediate size, where PyTorch saves act(gate) too.
"""

import torch
from torch import Tensor

from liger_patch.kernels.backend import serves_triton
from liger_patch.kernels.compilation import operator
from liger_patch.kernels.cross_entropy_pytorch import accumulation_dtype
from liger_patch.kernels.differentiation import LAYER_ADVICE, refuse_second_derivative

ACTIVATIONS = ("silu", "gelu_tanh")


def _gated_result(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@operator(_gated_result)
def _gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if serves_triton(gate):
        from liger_patch.kernels import gated_triton

        return gated_triton.gated(gate.contiguous(), up.contiguous(), activation)
    dtype = accumulation_dtype(gate.dtype)
    result = _gated_result(gate, up, activation)
    return result.copy_(_activated(gate.to(dtype), activation) * up.to(dtype))


def _gated_backward_results(
    dy: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    return _gated_result(gate, up, activation), _gated_result(up, up, activation)


@operator(_gated_backward_results)
def _gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    if serves_triton(gate):
        from liger_patch.kernels import gated_triton

        tensors = (dy.contiguous(), gate.contiguous(), up.contiguous())
        return gated_triton.gated_backward(*tensors, activation)
    dtype = accumulation_dtype(gate.dtype)
    wide = gate.to(dtype)
    upstream = dy.to(dtype)
    dup = upstream * _activated(wide, activation)
    if activation == "silu":
        dgate = torch.ops.aten.silu_backward(upstream * up.to(dtype), wide)
    else:
        dgate = torch.ops.aten.gelu_backward(upstream * up.to(dtype), wide, approximate="tanh")
    results = _gated_backward_results(dy, gate, up, activation)
    return results[0].copy_(dgate), results[1].copy_(dup)


def _activated(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh")


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _gated(gate, up, activation)

    @staticmethod
    def backward(ctx, dy: Tensor):
        refuse_second_derivative("gated", LAYER_ADVICE)
        gate, up = ctx.saved_tensors
        return *_gated_backward(dy, gate, up, ctx.activation), None


def gated(gate: Tensor, up: Tensor, *, activation: str = "silu") -> Tensor:
    """``act(gate) * up``, saving nothing but its inputs.

    Args:
        gate, up: of one shape, floating dtype and device.
        activation: "silu" or "gelu_tanh".

    Returns:
        Of the same shape and dtype, contiguous.

    Raises:
        ValueError: what does not fit.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    if not gate.is_floating_point():
        raise ValueError(f"gate must be floating point, got {gate.dtype}")
    for name in ("shape", "dtype", "device"):
        if getattr(up, name) != getattr(gate, name):
            raise ValueError(
                f"up must have the {name} of gate, {getattr(gate, name)}, got {getattr(up, name)}"
            )
    return _Gated.apply(gate, up, activation)
