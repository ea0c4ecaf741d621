"""Triton form of gated activations. The formulas are in ``gated``. Extra memory: none."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.cross_entropy_triton import _tanh, _tanh_derivative

# elements of a program: half of these in the backward pass, where more live at once, are up to 5 %
# faster, twice as many 40 % slower with gelu
BLOCK, BACKWARD_BLOCK = 2048, 1024
WARPS = 4
GELU_SLOPE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def _activated(x, IS_SILU: tl.constexpr):
    if IS_SILU:
        y = x / (1.0 + tl.exp(-x))
    else:
        y = 0.5 * x * (1.0 + _tanh((x + x * x * x * GELU_CUBE) * GELU_SLOPE))
    return y


@triton.jit
def _slope(x, IS_SILU: tl.constexpr):
    if IS_SILU:
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    else:
        inner = (x + x * x * x * GELU_CUBE) * GELU_SLOPE
        inner_slope = (1.0 + x * x * (3.0 * GELU_CUBE)) * GELU_SLOPE
        slope = 0.5 * (1.0 + _tanh(inner)) + 0.5 * x * _tanh_derivative(inner) * inner_slope
    return slope


@triton.jit
def _gated_kernel(gate_ptr, up_ptr, y_ptr, size, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    """One program per block."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offsets, _activated(gate, IS_SILU) * up, mask=mask)


@triton.jit
def _gated_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, size, IS_SILU: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per block."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(dup_ptr + offsets, dy * _activated(gate, IS_SILU), mask=mask)
    tl.store(dgate_ptr + offsets, dy * up * _slope(gate, IS_SILU), mask=mask)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``act(gate) * up`` of contiguous tensors."""
    y = torch.empty_like(gate)
    _launch(_gated_kernel, (gate, up, y), activation, BLOCK)
    return y


def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """dgate and dup, of contiguous tensors."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    _launch(_gated_backward_kernel, (dy, gate, up, dgate, dup), activation, BACKWARD_BLOCK)
    return dgate, dup


def _launch(kernel: Any, tensors: tuple[Tensor, ...], activation: str, block: int) -> None:
    size = tensors[0].numel()
    if size:
        with torch.cuda.device_of(tensors[0]):
            kernel[(triton.cdiv(size, block),)](
                *tensors, size, IS_SILU=activation == "silu", BLOCK=block, num_warps=WARPS
            )
