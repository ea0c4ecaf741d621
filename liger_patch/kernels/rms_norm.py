"""Root mean square normalisation (arXiv:1910.07467), as Llama's and as Gemma's layers have it.

    y = x * rstd * (offset + weight)        rstd = 1 / sqrt(mean(x ** 2) + eps)

over the last dimension, in float32 (float64 for float64), rounded once. With g = dy (offset +
weight) and n = x * rstd:

    dx = rstd (g - n mean(g n))             dweight = sum over rows of dy n

H: hidden size. Saved for the backward pass: the input itself, which its producer mostly holds too.
The backward pass reads its rows anyway, and computes rstd again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    LAYER_ADVICE,
    check_backward,
    contiguous,
    empty_in_order,
    in_order_of,
    serves_triton,
)
from liger_patch.kernels.graphs import differentiable, operator

MAX_HIDDEN_SIZE = 32768  # of the Triton form: a row's registers


def _forward_results(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, dtype: torch.dtype
) -> Tensor:
    return empty_in_order(x, dtype)


@operator(_forward_results)
def rms_norm_forward(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, dtype: torch.dtype
) -> Tensor:
    """Return y (..., H)."""
    y = empty_in_order(x, dtype)
    if x.shape[-1] <= MAX_HIDDEN_SIZE and serves_triton(x, weight):
        from liger_patch.kernels.triton import rms_norm as rms_norm_triton

        rows = in_order_of(y, x)
        rms_norm_triton.rms_norm(rows, contiguous(weight), eps, offset, y)
    else:
        wide, rstd = _wide_and_rstd(x, eps)
        normed = wide * rstd
        y.copy_(normed if weight is None else normed * (offset + weight.to(wide.dtype)))
    return y


def _wide_and_rstd(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x (..., H) and rstd (..., 1) in the dtype of the sums."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return wide, torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))


def _backward_results(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    if weight is None or not wants_weight:
        return empty_in_order(x), x.new_empty(0)
    return empty_in_order(x), torch.empty_like(weight, memory_format=torch.contiguous_format)


@operator(_backward_results)
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, offset: float, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return dx and dweight (H,), which is empty where it is not wanted."""
    dx, dweight = _backward_results(dy, x, weight, eps, offset, wants_weight)
    if x.shape[-1] <= MAX_HIDDEN_SIZE and serves_triton(x, weight):
        from liger_patch.kernels.triton import rms_norm as rms_norm_triton

        # hooks of saved tensors may have given x another order than that of the forward pass
        inputs = in_order_of(dx, dy), in_order_of(dx, x), contiguous(weight), eps, offset
        rms_norm_triton.rms_norm_backward(*inputs, dx, dweight if dweight.numel() else None)
    else:
        normed, rstd = _wide_and_rstd(x, eps)
        wide, normed = dy.to(rstd.dtype), normed * rstd
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
        eps, offset: of the formula.
        dtype: of the result.
    """

    x: Tensor
    weight: Tensor | None
    eps: float
    offset: float
    dtype: torch.dtype

    def norm(self) -> Tensor:
        """Return the norm (..., H) again, the same bits, and record nothing."""
        return rms_norm_forward(self.x, self.weight, self.eps, self.offset, self.dtype)


def _save(ctx: Any, inputs: tuple, result: Tensor) -> None:
    x, weight, *ctx.numbers, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    check_backward("rms_norm", dy, advice=LAYER_ADVICE)
    x, weight = ctx.saved_tensors
    eps, offset = ctx.numbers
    wants_x, wants_weight, *_ = ctx.needs_input_grad
    dx, dweight = rms_norm_backward(dy, x, weight, eps, offset, wants_weight)
    return dx if wants_x else None, dweight if wants_weight else None, None, None, None


# of x (..., H), weight (H,) or None, eps, offset, and the dtype of y (..., H): unchecked
run_rms_norm = differentiable(rms_norm_forward, _save, _backward)
