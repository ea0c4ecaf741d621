"""Root mean square normalisation (arXiv:1910.07467), as Llama's and as Gemma's layers have it.

    y = x * rstd * (offset + weight)        rstd = 1 / sqrt(mean(x ** 2) + eps)

over the last dimension, in float32 (float64 for float64), rounded once. With g = dy (offset +
weight) and n = x * rstd:

    dx = rstd (g - n mean(g n))             dweight = sum over rows of dy n

H: hidden size, R: rows. Saved for the backward pass, in bytes a row: the input itself (2 H in bf16,
which its maker mostly holds too) and 4.
"""

from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    LAYER_ADVICE,
    check_backward,
    serves_triton,
)
from liger_patch.kernels.graphs import constant, differentiable, operator
from liger_patch.kernels.rows import (
    contiguous,
    empty_in_order,
    empty_per_row,
    in_order_of,
    per_row_in_order_of,
)

NUMBERS = (int, float, Real, torch.SymInt, torch.SymFloat)  # symbols of a dynamic trace
MAX_HIDDEN_SIZE = 32768  # of the Triton form: a row's registers


def _forward_results(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    y = empty_in_order(x, dtype)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return y, empty_per_row(y, wide)


@operator(_forward_results)
def rms_norm_forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return y and rstd (...)."""
    y, rstd = _forward_results(x, weight, eps, offset, dtype)
    if x.shape[-1] <= MAX_HIDDEN_SIZE and serves_triton(x, weight):
        from liger_patch.kernels.triton import rms_norm as rms_norm_triton

        rows = in_order_of(y, x)
        rms_norm_triton.rms_norm(rows, contiguous(weight), eps, offset, y, rstd)
    else:
        wide = x.to(rstd.dtype)
        rstd.copy_(torch.rsqrt(wide.square().mean(-1).add_(eps)))
        normed = wide * rstd[..., None]
        y.copy_(normed if weight is None else normed * (offset + weight.to(rstd.dtype)))
    return y, rstd


def _backward_results(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    if weight is None or not wants_weight:
        return empty_in_order(x), x.new_empty(0)
    return empty_in_order(x), torch.empty_like(weight, memory_format=torch.contiguous_format)


@operator(_backward_results, is_backward=True)
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return dx and dweight (H,), which is empty where it is not wanted."""
    dx, dweight = _backward_results(dy, x, weight, rstd, offset, wants_weight)
    if x.shape[-1] <= MAX_HIDDEN_SIZE and serves_triton(x, weight):
        from liger_patch.kernels.triton import rms_norm as rms_norm_triton

        # hooks of saved tensors may have given x another order than that of the forward pass
        rstd = per_row_in_order_of(dx, rstd)
        inputs = (in_order_of(dx, dy), in_order_of(dx, x), contiguous(weight), rstd)
        rms_norm_triton.rms_norm_backward(*inputs, offset, dx, dweight if dweight.numel() else None)
    else:
        rstd = rstd[..., None]
        wide, normed = dy.to(rstd.dtype), x.to(rstd.dtype) * rstd
        if dweight.numel():
            dweight.copy_((wide * normed).reshape(-1, x.shape[-1]).sum(0))
        wide = wide if weight is None else wide * (offset + weight.to(rstd.dtype))
        mean = (wide * normed).mean(-1, keepdim=True)
        dx.copy_((wide - normed * mean) * rstd)
    return dx, dweight


class NormInputs(NamedTuple):
    """What a norm is computed of, for a layer behind it that keeps this in the norm's place.

    Attributes:
        x: (..., H).
        weight: (H,), or None.
        eps, offset, dtype: as ``rms_norm`` takes them.
    """

    x: Tensor
    weight: Tensor | None
    eps: float
    offset: float
    dtype: torch.dtype

    def norm(self) -> Tensor:
        """Return the norm (..., H) again, the same bits, and record nothing."""
        return rms_norm_forward(self.x, self.weight, self.eps, self.offset, self.dtype)[0]


def _save(ctx: Any, inputs: tuple, results: tuple[Tensor, Tensor]) -> None:
    x, weight, _, offset, _ = inputs
    ctx.save_for_backward(x, weight, results[1])
    ctx.offset = offset


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        results = rms_norm_forward(*inputs)
        _save(ctx, inputs, results)
        return results[0]

    @staticmethod
    def backward(ctx, dy: Tensor):
        check_backward("rms_norm", dy, advice=LAYER_ADVICE)
        x, weight, rstd = ctx.saved_tensors
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        dx, dweight = rms_norm_backward(dy, x, weight, rstd, ctx.offset, wants_weight)
        return dx if wants_x else None, dweight if wants_weight else None, None, None, None


differentiable("rms_norm_forward", _RmsNorm, _save)


def rms_norm(
    x: Tensor,  # (..., H)
    weight: Tensor | None,  # (H,)
    eps: float,
    *,
    offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``x / sqrt(mean(x ** 2) + eps) * (offset + weight)`` over the last dimension.

    Saved for the backward pass: ``x``, which the caller mostly holds too, and 4 bytes a row.

    Args:
        x: (..., H), floating point.
        weight: (H,) on the same device; None for none.
        eps: added to the mean of the squares, >= 0.
        offset: added to the weight: 1 in Gemma's layers.
        dtype: of the result; by default that of ``x``.

    Returns:
        (..., H), dense, with the rows of ``x`` in their order in memory.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    if x.dim() == 0 or not x.shape[-1] or not x.is_floating_point():
        given = f"{x.dtype} {tuple(x.shape)}"
        raise ValueError(f"x must be floating point (..., H) with H > 0, got {given}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating point or None, got {dtype}")
    if weight is not None and tuple(weight.shape) != x.shape[-1:]:
        raise ValueError(f"weight must have shape ({x.shape[-1]},), got {tuple(weight.shape)}")
    if weight is not None and weight.device != x.device:
        raise ValueError(f"weight must be on {x.device} as x is, got {weight.device}")
    if weight is not None and not weight.is_floating_point():
        raise ValueError(f"weight must be floating point, got {weight.dtype}")
    if not (isinstance(eps, NUMBERS) and eps >= 0):
        raise ValueError(f"eps must be a number >= 0, got {eps!r}")
    if not isinstance(offset, NUMBERS):
        raise ValueError(f"offset must be a number, got {offset!r}")
    return run_rms_norm(x, weight, eps, offset, dtype or x.dtype)


def run_rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, dtype: torch.dtype
) -> Tensor:
    """Compute what ``rms_norm`` does, of arguments that fit."""
    if torch.compiler.is_compiling():
        eps, offset = constant(eps), constant(offset)
    return _RmsNorm.apply(x, weight, eps, offset, dtype)
