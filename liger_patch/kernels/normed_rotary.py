"""Norms of queries and keys, each attention head's own, and their rotary embedding in one launch.

    y = rotary(rms_norm(x, weight))

of the formulas in ``rms_norm`` and ``rotary``, with both roundings: the norm's result is rounded to
its dtype before it is turned. Results and gradients of q and k have the bits that the two operators
give, where the sums over a row have one order: a GPU's threads share rows of fewer than 32 features
in another way. The gradients of the weights are sums of the same float32 values in another order.

D: features of a head, R: how many of them are turned. Saved for the backward pass, in bytes a row:
the input itself (2 D in bf16) and 4, as by the norms alone.
"""

from typing import Any

import torch
from torch import Tensor

from liger_patch.kernels.backend import (
    LAYER_ADVICE,
    TRITON_DTYPES,
    accumulation_dtype,
    check_backward,
    serves_triton,
)
from liger_patch.kernels.graphs import constant, differentiable, operator
from liger_patch.kernels.rms_norm import NUMBERS, rms_norm_backward, rms_norm_forward
from liger_patch.kernels.rotary import check_rotation, rotate
from liger_patch.kernels.rows import contiguous, empty_tokens_first

MAX_HEAD_SIZE = 1024  # of the Triton form: a row's registers


def _normed_rotary_results(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
    norm_dtype: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q_rstd, k_rstd = (_per_row(x) for x in (q, k))
    return empty_tokens_first(q, dtype), empty_tokens_first(k, dtype), q_rstd, k_rstd


def _per_row(x: Tensor) -> Tensor:
    """Return (B, T, num_heads) memory for one number a row of x (B, num_heads, T, D)."""
    batch, num_heads, tokens, _ = x.shape
    return x.new_empty(batch, tokens, num_heads, dtype=accumulation_dtype(x.dtype))


@operator(_normed_rotary_results)
def _normed_rotary(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: float,
    norm_dtype: torch.dtype,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weights = q_weight, k_weight
    if not _serves(q, k, *weights, cos, sin, dtypes=(norm_dtype, dtype)):
        (q, q_rstd), (k, k_rstd) = (
            rms_norm_forward(x, weight, eps, offset, norm_dtype)
            for x, weight in zip((q, k), weights, strict=True)
        )
        q, k = rotate(q, k, cos, sin, dtype, False, False, False)
        return q, k, q_rstd.mT.contiguous(), k_rstd.mT.contiguous()
    from liger_patch.kernels.triton import normed_rotary as normed_rotary_triton

    q_out, k_out, q_rstd, k_rstd = results = _normed_rotary_results(
        q, k, *weights, cos, sin, eps, offset, norm_dtype, dtype
    )
    weights = contiguous(q_weight), contiguous(k_weight)
    inputs = ((q, k), weights, cos, sin, eps, offset, norm_dtype)
    normed_rotary_triton.normed_rotary(*inputs, (q_out, k_out), (q_rstd, k_rstd))
    return results


def _normed_rotary_backward_results(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    offset: float,
    norm_dtype: torch.dtype,
    wants_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk = empty_tokens_first(q, q.dtype), empty_tokens_first(k, k.dtype)
    if q_weight is None or not wants_weights:
        return dq, dk, q.new_empty(0)
    return dq, dk, q_weight.new_empty(2, len(q_weight))


@operator(_normed_rotary_backward_results, is_backward=True)
def _normed_rotary_backward(
    dq_out: Tensor,
    dk_out: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    offset: float,
    norm_dtype: torch.dtype,
    wants_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dweights = results = _normed_rotary_backward_results(
        dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, q_rstd, k_rstd,
        offset, norm_dtype, wants_weights,
    )  # fmt: skip
    weights, gradients = (q_weight, k_weight), (dq, dk)
    serves = _serves(q, k, *weights, cos, sin, dtypes=(norm_dtype, dq_out.dtype))
    if serves and serves_triton(dq_out, dk_out):
        from liger_patch.kernels.triton import normed_rotary_backward as backward_triton

        weights = contiguous(q_weight), contiguous(k_weight)
        # hooks of saved tensors may have given these other strides
        rstds = (q_rstd.contiguous(), k_rstd.contiguous())
        inputs = ((dq_out, dk_out), (q, k), weights, cos, sin, rstds, offset, norm_dtype)
        wanted = dweights if dweights.numel() else None
        backward_triton.normed_rotary_backward(*inputs, gradients, wanted)
        return results
    upstream = rotate(dq_out, dk_out, cos, sin, norm_dtype, False, False, True)
    rows = zip(upstream, (q, k), weights, (q_rstd, k_rstd), gradients, strict=True)
    for i, (dy, x, weight, rstd, dx) in enumerate(rows):
        own = (dy, x, weight, rstd.transpose(1, 2), offset, wants_weights)
        dx_own, dweight = rms_norm_backward(*own)
        dx.copy_(dx_own)
        if dweights.numel():
            dweights[i] = dweight
    return results


def _serves(q: Tensor, *others: Tensor | None, dtypes: tuple[torch.dtype, ...]) -> bool:
    if any(each not in TRITON_DTYPES for each in dtypes):
        return False
    return serves_triton(q, *others) and q.shape[-1] <= MAX_HEAD_SIZE


def _save(ctx: Any, inputs: tuple, results: tuple[Tensor, ...]) -> None:
    *tensors, _, offset, norm_dtype, _ = inputs
    ctx.save_for_backward(*tensors, *results[2:])
    ctx.norm = offset, norm_dtype


class _NormedRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        results = _normed_rotary(*inputs)
        _save(ctx, inputs, results)
        return results[:2]

    @staticmethod
    def backward(ctx, dq_out: Tensor, dk_out: Tensor):
        check_backward("normed_rotary", dq_out, dk_out, advice=LAYER_ADVICE)
        wanted = ctx.needs_input_grad[:4]
        inputs: Any = (dq_out, dk_out, *ctx.saved_tensors, *ctx.norm, any(wanted[2:]))
        dq, dk, dweights = _normed_rotary_backward(*inputs)
        gradients = (dq, dk, *(dweights if any(wanted[2:]) else (None, None)))
        gradients = (g if wants else None for g, wants in zip(gradients, wanted, strict=True))
        return *gradients, None, None, None, None, None, None


differentiable("normed_rotary", _NormedRotary, _save, returned=2)


def normed_rotary(
    q: Tensor,  # (B, num_heads, T, D)
    k: Tensor,  # (B, other num_heads, T, D)
    q_weight: Tensor | None,  # (D,)
    k_weight: Tensor | None,  # (D,)
    cos: Tensor,  # (B or 1, T, R)
    sin: Tensor,  # (B or 1, T, R)
    eps: float,
    *,
    offset: float = 0.0,
    norm_dtype: torch.dtype | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Norm queries and keys over their features, then turn them as ``rotary`` does.

    Args:
        q, k: (B, num_heads, T, D), D > 0, each of its own number of heads, of one floating dtype;
            of any strides.
        q_weight, k_weight: (D,) of one floating dtype, or both None. Where one of them needs a
            gradient, those of both are summed.
        cos, sin: (B or 1, T, R), R even and at most D, of any strides; no gradient is computed for
            them.
        eps: added to the mean of the squares, >= 0.
        offset: added to the weights: 1 in Gemma's layers.
        norm_dtype: of the norms' results; by default that of ``q``.
        dtype: of the results; by default the one that the norm's result times ``cos`` has.

    Returns:
        Both, tokens in front of attention heads in memory.

    Raises:
        ValueError: what does not fit.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    check_rotation(q, k, cos, sin)
    if not q.shape[-1]:
        raise ValueError(f"q must have D > 0, got {tuple(q.shape)}")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        _check_weight(name, weight, q)
    if q_weight is None or k_weight is None:
        if q_weight is not k_weight:
            raise ValueError("q_weight and k_weight must both be tensors or both None")
    elif k_weight.dtype != q_weight.dtype:
        raise ValueError(f"k_weight must be {q_weight.dtype} as q_weight, got {k_weight.dtype}")
    if not (isinstance(eps, NUMBERS) and eps >= 0):
        raise ValueError(f"eps must be a number >= 0, got {eps!r}")
    if not isinstance(offset, NUMBERS):
        raise ValueError(f"offset must be a number, got {offset!r}")
    for name, each in (("norm_dtype", norm_dtype), ("dtype", dtype)):
        if each is not None and not each.is_floating_point:
            raise ValueError(f"{name} must be floating point or None, got {each}")
    norm_dtype = norm_dtype or q.dtype
    dtype = dtype or torch.promote_types(norm_dtype, cos.dtype)
    form = constant(eps), constant(offset), norm_dtype, dtype
    return _NormedRotary.apply(q, k, q_weight, k_weight, cos, sin, *form)


def _check_weight(name: str, weight: Tensor | None, q: Tensor) -> None:
    if weight is None:
        return
    size = q.shape[-1]
    if tuple(weight.shape) != (size,) or not weight.is_floating_point():
        given = f"{weight.dtype} {tuple(weight.shape)}"
        raise ValueError(f"{name} must be floating point ({size},), got {given}")
    if weight.device != q.device:
        raise ValueError(f"{name} must be on {q.device} as q is, got {weight.device}")
