"""The gated activation of a feed-forward layer: SwiGLU and GeGLU (arXiv:2002.05202).

    y = act(gate) * up          act = silu, or gelu, exact or in its tanh form

in float32 (float64 for float64), rounded once. gate and up are two tensors, or the halves of the
rows of one. Saved for the backward pass: gate and up, nothing beside: 4 I bytes a token in bf16,
for I the intermediate size; PyTorch saves act(gate) too, 6 I.
"""

from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    LAYER_ADVICE,
    accumulation_dtype,
    check_backward,
    contiguous,
    serves_triton,
)
from liger_patch.kernels.graphs import differentiable, operator

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
APPROXIMATE = {"gelu_tanh": "tanh", "gelu": "none"}


def _gated_result(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@operator(_gated_result)
def gated_forward(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """Return ``act(gate) * up``."""
    y = _gated_result(gate, up, activation)
    if serves_triton(gate, up):
        from liger_patch.kernels.triton import gated as gated_triton

        gated_triton.gated(gate.contiguous(), contiguous(up), y, activation)
        return y
    dtype = accumulation_dtype(y.dtype)
    gate, up = _parts(gate, up)
    return y.copy_(act(gate.to(dtype), activation) * up.to(dtype))


def _gated_backward_results(
    dy: Tensor, gate: Tensor, up: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    return dgate, gate.new_empty(0) if up is None else torch.empty_like(dgate)


@operator(_gated_backward_results)
def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    return _gradients(dy.contiguous(), gate, up, None, activation)


@operator(_gated_backward_results, mutates=("dy",))
def gated_backward_(
    dy: Tensor, gate: Tensor, up: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up; write ``act(gate) * up`` to ``dy``, a contiguous one."""
    return _gradients(dy, gate, up, dy, activation)


def _gradients(
    dy: Tensor, gate: Tensor, up: Tensor | None, y: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    dgate, dup = results = _gated_backward_results(dy, gate, up, activation)
    if serves_triton(dy, gate, up):
        from liger_patch.kernels.triton import gated as gated_triton

        tensors = (dy, gate.contiguous(), contiguous(up), dgate, None if up is None else dup, y)
        gated_triton.gated_backward(*tensors, activation)
        return results
    dgate, dup = _parts(dgate, None if up is None else dup)
    gate, up = _parts(gate, up)
    dtype = accumulation_dtype(gate.dtype)
    wide, wide_up, upstream = gate.to(dtype), up.to(dtype), dy.to(dtype)
    activated = act(wide, activation)
    dup.copy_(upstream * activated)
    if activation == "silu":
        dgate.copy_(torch.ops.aten.silu_backward(upstream * wide_up, wide))
    else:
        approximate = APPROXIMATE[activation]
        slope = torch.ops.aten.gelu_backward(upstream * wide_up, wide, approximate=approximate)
        dgate.copy_(slope)
    if y is not None:
        y.copy_(activated * wide_up)
    return results


def _parts(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, -1)
    return first, second


def act(gate: Tensor, activation: str) -> Tensor:
    """Return the activation of gate, with PyTorch's operations."""
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate=APPROXIMATE[activation])


def _save(ctx: Any, inputs: tuple, _: object) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    check_backward("gated", dy, advice=LAYER_ADVICE)
    gate, up = ctx.saved_tensors
    dgate, dup = gated_backward(dy, gate, up, ctx.activation)
    return dgate, None if up is None else dup, None


# of gate and up (..., I), or gate (..., 2 I) and None, and one of ACTIVATIONS: unchecked
run_gated = differentiable(gated_forward, _save, _backward)
