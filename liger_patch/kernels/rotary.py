"""Rotary position embedding (arXiv:2104.09864) of queries and keys in one launch.

Of the first R of D features of each head, x1 and x2 the first and the second half of them:

    y1 = x1 cos1 - x2 sin1          y2 = x2 cos2 + x1 sin2

in float32 (float64 for float64), rounded once; features beyond R are copied. cos and sin hold the
angles of each token, whatever its position: any order, restarts, packed rows. B: sequences, T:
tokens. Saved for the backward pass: cos and sin, shared by all layers.
"""

import torch
from torch import Tensor

from liger_patch.kernels.backend import serves_triton
from liger_patch.kernels.compilation import operator
from liger_patch.kernels.cross_entropy_pytorch import accumulation_dtype
from liger_patch.kernels.differentiation import LAYER_ADVICE, refuse_second_derivative


def _rotary_results(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, backward: bool
) -> tuple[Tensor, Tensor]:
    return _like(q, dtype), _like(k, dtype)


@operator(_rotary_results)
def _rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, backward: bool
) -> tuple[Tensor, Tensor]:
    outputs = _rotary_results(q, k, cos, sin, dtype, backward)
    if all(serves_triton(each) for each in (q, k, cos, sin, outputs[0])):
        from liger_patch.kernels import rotary_triton

        rotary_triton.rotary((q, k), cos, sin, outputs, backward=backward)
    else:
        for x, out in zip((q, k), outputs, strict=True):
            _rotated(x, cos[:, None], sin[:, None], out, backward)
    return outputs


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens in front of heads in memory, as the products that made them left them."""
    tokens_first = x.transpose(1, 2)
    empty = torch.empty_like(tokens_first, dtype=dtype, memory_format=torch.contiguous_format)
    return empty.transpose(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, backward: bool) -> None:
    dtype = accumulation_dtype(out.dtype)
    turned = cos.shape[-1]
    cos1, cos2 = cos.to(dtype).chunk(2, -1)
    sin1, sin2 = sin.to(dtype).chunk(2, -1)
    x1, x2 = x[..., :turned].to(dtype).chunk(2, -1)
    if backward:
        halves = (x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1)
    else:
        halves = (x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2)
    out[..., :turned] = torch.cat(halves, -1)
    out[..., turned:] = x[..., turned:]


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype):
        ctx.save_for_backward(cos, sin)
        ctx.dtype = q.dtype
        return _rotary(q, k, cos, sin, dtype, False)

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor):
        refuse_second_derivative("rotary", LAYER_ADVICE)
        cos, sin = ctx.saved_tensors
        turned_back = _rotary(dq, dk, cos, sin, ctx.dtype, True)
        return *turned_back, None, None, None


def rotary(
    q: Tensor,  # (B, heads, T, D)
    k: Tensor,  # (B, other heads, T, D)
    cos: Tensor,  # (B or 1, T, R)
    sin: Tensor,  # (B or 1, T, R)
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by the angles of their tokens' positions.

    Args:
        q, k: (B, heads, T, D), each with heads of its own number, of one floating dtype; of any
            strides.
        cos, sin: (B or 1, T, R), R even and at most D; no gradient is computed for them.
        dtype: of the results; by default the one that ``q * cos`` has.

    Returns:
        Both, tokens in front of heads in memory.

    Raises:
        ValueError: what does not fit.
        RuntimeError: in the backward pass, with ``create_graph=True``.
    """
    if q.dim() != 4 or not q.is_floating_point():
        raise ValueError(
            f"q must be floating point (B, heads, T, D), got {q.dtype} {tuple(q.shape)}"
        )
    batch, _, tokens, size = q.shape
    if k.dim() != 4 or (k.shape[0], *k.shape[2:]) != (batch, tokens, size) or k.dtype != q.dtype:
        expected, given = f"({batch}, heads, {tokens}, {size})", f"{k.dtype} {tuple(k.shape)}"
        raise ValueError(f"k must be {q.dtype} {expected}, got {given}")
    if k.device != q.device:
        raise ValueError(f"k must be on {q.device} as q is, got {k.device}")
    for name, table in (("cos", cos), ("sin", sin)):
        shape = tuple(table.shape)
        if len(shape) != 3 or shape[0] not in (1, batch) or shape[1] != tokens:
            raise ValueError(f"{name} must have shape ({batch} or 1, {tokens}, R), got {shape}")
        if shape[2] % 2 or shape[2] > size or table.shape != cos.shape:
            raise ValueError(f"{name} must have an even R of at most {size} features, got {shape}")
        if table.requires_grad:
            raise ValueError(f"{name} must not require a gradient: none is computed for it")
        if table.device != q.device:
            raise ValueError(f"{name} must be on {q.device} as q is, got {table.device}")
    return _Rotary.apply(q, k, cos, sin, dtype or torch.promote_types(q.dtype, cos.dtype))
