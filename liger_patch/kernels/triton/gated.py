"""Triton form of gated activations. The formulas are in ``gated``. Extra memory: none."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.triton.launch import launch
from liger_patch.kernels.triton.softcap import tanh, tanh_derivative

# elements of a program: half of these in the backward pass, where more live at once, are up to 5 %
# faster, twice as many 40 % slower with gelu
BLOCK, BACKWARD_BLOCK = 2048, 1024
WARPS = 4
KINDS = ("silu", "gelu_tanh", "gelu")  # a kernel's ACTIVATION is a place in this tuple
SILU, GELU_TANH = tl.constexpr(KINDS.index("silu")), tl.constexpr(KINDS.index("gelu_tanh"))
GELU_SLOPE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
GELU_CUBE = tl.constexpr(0.044715)
LOG2_E = tl.constexpr(1.4426950216293335)  # in float32
LOG2_E_REST = tl.constexpr(1.92596298909109e-8)  # which float32 leaves out
ROOT_HALF = tl.constexpr(0.7071067811865476)  # sqrt(1 / 2)
ROOT_HALF_PI = tl.constexpr(0.3989422804014327)  # sqrt(1 / (2 pi))
LN_2 = tl.constexpr(0.6931471805599453)
MAX_EXPONENT = tl.constexpr(104.0)  # e^104 is inf in float32, and e^-104 is 0


@triton.jit
def _exp(x, IS_FLOAT32: tl.constexpr):
    """Return e^x in float32; with IS_FLOAT32 without the |x| eps that ``tl.exp`` loses, which
    rounds x log2(e). Values of 16 bits do not see them.
    """
    if IS_FLOAT32:
        x = tl.minimum(tl.maximum(x, -MAX_EXPONENT), MAX_EXPONENT)
        product = x * LOG2_E
        rest = tl.fma(x, LOG2_E, -product) + x * LOG2_E_REST
        y = tl.exp2(product) * (1.0 + rest * LN_2)
    else:
        y = tl.exp(x)
    return y


@triton.jit
def sigmoid(x, IS_FLOAT32: tl.constexpr):
    """Return 1 / (1 + e^-x) in float32."""
    return 1.0 / (1.0 + _exp(-x, IS_FLOAT32))


@triton.jit
def apply_activation(
    x,
    ACTIVATION: tl.constexpr,
    IS_FLOAT32: tl.constexpr = False,  # pyright: ignore[reportArgumentType]
):
    """Return act(x)."""
    if ACTIVATION == SILU:
        y = x / (1.0 + _exp(-x, IS_FLOAT32))
    elif ACTIVATION == GELU_TANH:
        y = 0.5 * x * (1.0 + tanh((x + x * x * x * GELU_CUBE) * GELU_SLOPE))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * ROOT_HALF))
    return y


@triton.jit
def activation_slope(
    x,
    ACTIVATION: tl.constexpr,
    IS_FLOAT32: tl.constexpr = False,  # pyright: ignore[reportArgumentType]
):
    """Return the derivative of act at x."""
    if ACTIVATION == SILU:
        share = sigmoid(x, IS_FLOAT32)
        slope = share * (1.0 + x * (1.0 - share))
    elif ACTIVATION == GELU_TANH:
        inner = (x + x * x * x * GELU_CUBE) * GELU_SLOPE
        inner_slope = (1.0 + x * x * (3.0 * GELU_CUBE)) * GELU_SLOPE
        slope = 0.5 * (1.0 + tanh(inner)) + 0.5 * x * tanh_derivative(inner) * inner_slope
    else:
        density = ROOT_HALF_PI * _exp(-0.5 * x * x, IS_FLOAT32)
        slope = 0.5 * (1.0 + tl.erf(x * ROOT_HALF)) + x * density
    return slope


@triton.jit
def _places(columns, IS_HALVES: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a program's elements are in results and in gates, and which of them exist."""
    if IS_HALVES:
        blocks = tl.cdiv(columns, BLOCK)  # of a row
        row = (tl.program_id(0) // blocks).to(tl.int64)
        column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        place, gate_place = row * columns + column, row * columns * 2 + column
    else:
        column = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        place, gate_place = column, column
    return place, gate_place, column < columns


@triton.jit
def _gated_kernel(
    gate_ptr,  # (rows, columns), or (rows, 2 columns): gate, then up
    up_ptr,  # (rows, columns), None if behind the gate
    y_ptr,  # (rows, columns)
    columns,  # I where up is behind the gate; else all elements, as one row
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of a row."""
    second_ptr = gate_ptr + columns if up_ptr is None else up_ptr
    place, gate_place, mask = _places(columns, up_ptr is None, BLOCK)  # pyright: ignore
    gate = tl.load(gate_ptr + gate_place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(second_ptr + gate_place, mask=mask, other=0.0).to(tl.float32)
    is_float32: tl.constexpr = gate_ptr.dtype.element_ty == tl.float32
    tl.store(y_ptr + place, apply_activation(gate, ACTIVATION, is_float32) * up, mask=mask)


@triton.jit
def _gated_backward_kernel(
    dy_ptr,  # (rows, columns)
    gate_ptr,  # (rows, columns), or (rows, 2 columns): gate, then up
    up_ptr,  # (rows, columns), None if behind the gate
    dgate_ptr,  # of gate's shape
    dup_ptr,  # of up's shape
    y_ptr,  # (rows, columns), which may be dy; None if not wanted
    columns,  # I where up is behind the gate; else all elements, as one row
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of a row."""
    second_ptr = gate_ptr + columns if up_ptr is None else up_ptr
    dsecond_ptr = dgate_ptr + columns if up_ptr is None else dup_ptr
    place, gate_place, mask = _places(columns, up_ptr is None, BLOCK)  # pyright: ignore
    dy = tl.load(dy_ptr + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gate_place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(second_ptr + gate_place, mask=mask, other=0.0).to(tl.float32)
    is_float32: tl.constexpr = gate_ptr.dtype.element_ty == tl.float32
    activated = apply_activation(gate, ACTIVATION, is_float32)
    slope = activation_slope(gate, ACTIVATION, is_float32)
    tl.store(dsecond_ptr + gate_place, dy * activated, mask=mask)
    tl.store(dgate_ptr + gate_place, dy * up * slope, mask=mask)
    if y_ptr is not None:
        tl.debug_barrier()  # every thread has read its dy before any thread overwrites it
        tl.store(y_ptr + place, activated * up, mask=mask)


def gated(
    gate: Tensor,  # (..., I), or (..., 2 I): gate, then up
    up: Tensor | None,  # (..., I), None if behind the gate
    y: Tensor,  # (..., I)
    activation: str,
) -> None:
    """Write ``act(gate) * up``; all contiguous."""
    columns = y.numel() if up is not None else y.shape[-1]
    _launch(_gated_kernel, (gate, up, y), y.numel(), columns, activation, BLOCK)


def gated_backward(
    dy: Tensor,  # (..., I)
    gate: Tensor,  # (..., I), or (..., 2 I): gate, then up
    up: Tensor | None,  # (..., I), None if behind the gate
    dgate: Tensor,  # of gate's shape
    dup: Tensor | None,  # of up's shape
    y: Tensor | None,  # (..., I), which may be dy
    activation: str,
) -> None:
    """Write dgate and dup, and ``act(gate) * up`` where y is wanted; all contiguous."""
    columns = dy.numel() if up is not None else dy.shape[-1]
    tensors = (dy, gate, up, dgate, dup, y)
    _launch(_gated_backward_kernel, tensors, dy.numel(), columns, activation, BACKWARD_BLOCK)


def _launch(
    kernel: Any,
    tensors: tuple[Any, ...],
    size: int,
    columns: int,
    activation: str,
    block: int,
) -> None:
    if not size:
        return
    programs = size // columns * -(-columns // block)
    launch(
        kernel,
        (programs,),
        *tensors,
        columns,
        ACTIVATION=KINDS.index(activation),
        BLOCK=block,
        num_warps=WARPS,
    )
