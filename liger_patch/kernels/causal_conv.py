"""Depthwise causal convolution over tokens, as layers of linear attention have it in front of their
recurrence:

    y_t = act(p_t)        p_t = bias + sum over j < W of weight_(W - 1 - j) x_(t - j)

in float32 (float64 for float64), rounded once. x is 0 before the first token of a sequence. With
dp = dy act'(p):

    dx_t = sum over j < W of weight_(W - 1 - j) dp_(t + j)

B: batch, T: tokens, C: channels, W: width. Saved for the backward pass: the arguments.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from liger_patch.kernels.backend import (
    LAYER_ADVICE,
    accumulation_dtype,
    check_backward,
    contiguous,
    contiguous_features,
    serves_triton,
)
from liger_patch.kernels.graphs import differentiable, operator

ACTIVATIONS = (None, "silu")
MAX_WIDTH = 4  # of the Triton form, which holds so many tokens in registers


def _conv_results(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@operator(_conv_results)
def _causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sequence_ids: Tensor | None,
    activation: str | None,
) -> Tensor:
    y = _conv_results(x)
    if weight.shape[1] <= MAX_WIDTH and serves_triton(x, weight, bias):
        from liger_patch.kernels.triton import causal_conv as causal_conv_triton

        inputs = contiguous_features(x), weight.contiguous(), contiguous(bias), _ids(sequence_ids)
        causal_conv_triton.causal_conv(*inputs, activation, y)
        return y
    taps = _taps(x.to(accumulation_dtype(x.dtype)), weight.shape[1], sequence_ids)
    p = _sum_of_taps(taps, weight, bias)
    return y.copy_(p * p.sigmoid() if activation else p)


def _conv_backward_results(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


@operator(_conv_backward_results)
def _causal_conv_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sequence_ids: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = results = _conv_backward_results(dy, x, weight, bias)
    width = weight.shape[1]
    if width <= MAX_WIDTH and serves_triton(x, weight, bias):
        from liger_patch.kernels.triton import causal_conv as causal_conv_triton

        rows = contiguous_features(dy), contiguous_features(x)
        inputs = *rows, weight.contiguous(), contiguous(bias), _ids(sequence_ids)
        causal_conv_triton.causal_conv_backward(*inputs, activation, *results)
        return results
    dtype = accumulation_dtype(x.dtype)
    taps = _taps(x.to(dtype), width, sequence_ids)
    dp = dy.to(dtype)
    if activation:
        p = _sum_of_taps(taps, weight, bias)
        share = p.sigmoid()
        dp = dp * share * (1 + p * (1 - share))
    wide = weight.to(dtype)
    ahead = [_ahead(dp * wide[:, -1 - j], j, sequence_ids) for j in range(width)]
    dx.copy_(torch.stack(ahead).sum(0))
    dweight.copy_(torch.stack([(dp * tap).sum((0, 1)) for tap in reversed(taps)], -1))
    if bias is not None:
        dbias.copy_(dp.sum((0, 1)))
    return results


def _taps(x: Tensor, width: int, sequence_ids: Tensor | None) -> list[Tensor]:
    """Return x of the token itself, of the one before it, and so on."""
    taps = [x]
    for j in range(1, width):
        tap = pad(x, (0, 0, j, 0))[:, : x.shape[1]]
        taps.append(tap * _is_same(sequence_ids, j) if sequence_ids is not None else tap)
    return taps


def _ahead(x: Tensor, by: int, sequence_ids: Tensor | None) -> Tensor:
    """Return x of the token so far ahead."""
    if by and sequence_ids is not None:
        x = x * _is_same(sequence_ids, by)
    return pad(x, (0, 0, 0, by))[:, by:]


def _is_same(sequence_ids: Tensor, by: int) -> Tensor:
    """Return (B, T, 1): whether the token so far behind is of the same sequence."""
    before = pad(sequence_ids, (by, 0), value=-1)[:, : sequence_ids.shape[1]]
    return (before == sequence_ids)[..., None]


def _sum_of_taps(taps: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = weight.to(taps[0].dtype)
    p = taps[0] * wide[:, -1]
    for j, tap in enumerate(taps[1:], 1):
        p = p + tap * wide[:, -1 - j]
    return p if bias is None else p + bias.to(p.dtype)


def _ids(sequence_ids: Tensor | None) -> Tensor | None:
    return None if sequence_ids is None else sequence_ids.int().contiguous()


def _save(ctx: Any, inputs: tuple, result: Tensor) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    check_backward("causal_conv", dy, advice=LAYER_ADVICE)
    x, weight, bias, sequence_ids = ctx.saved_tensors
    gradients = _causal_conv_backward(dy, x, weight, bias, sequence_ids, ctx.activation)
    wanted = ctx.needs_input_grad[:3]
    gradients = (g if wants else None for g, wants in zip(gradients, wanted, strict=True))
    return *gradients, None, None


# of x (B, T, C), weight (C, W) with its last column for the token itself, bias (C,) or None, the
# ids >= 0 (B, T) of the rows' sequences or None, one of ACTIVATIONS: unchecked
run_causal_conv = differentiable(_causal_conv, _save, _backward)
