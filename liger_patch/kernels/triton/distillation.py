"""Triton form of the divergence of rows of logits. The formulas are in ``head/divergences``.

One program walks a row of both once for the log-sum-exps, with running maxima; once for the
divergence and the mean slope; and once to turn each of the student's logits into its gradient. The
last two walks are one for forward KL, whose gradient q - p needs no mean. The walks after the first
find the rows in the L2 cache. C: rows, V: classes of both. Extra memory: one float a row. Running
maximum: Milakov and Gimelshein (arXiv:1805.02867).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.head.divergences import DIVERGENCES, Divergence
from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.triton.launch import launch
from liger_patch.kernels.triton.softcap import apply_softcap, distance_from_max, tanh_derivative

MAX_BLOCK_V = 4096  # of both rows: half of what a program that walks one row holds
ELEMENTS_PER_THREAD = 8  # of one block
LEAST = tl.constexpr(-1e30)  # LOWEST of ``head/divergences``, where the next two are explained
NEAR = tl.constexpr(0.3)
FAR = tl.constexpr(80.0)
FORWARD_KL, REVERSE_KL, JSD = (tl.constexpr(i) for i in range(3))  # places in DIVERGENCES


@triton.jit
def _expm1(x):
    """Compute exp(x) - 1 to float32's last digits, near 0 too."""
    # the series to x^7 is off by 5e-9 of x at 0.3
    series = 1.0 + x / 4 * (1.0 + x / 5 * (1.0 + x / 6 * (1.0 + x / 7)))
    near = x * (1.0 + x / 2 * (1.0 + x / 3 * series))
    return tl.where(tl.abs(x) < NEAR, near, tl.exp(x) - 1.0)


@triton.jit
def _log1p(x):
    """Compute log(1 + x) to float32's last digits, near 0 too."""
    u = 1.0 + x
    # what u has lost of x, log(u) lacks in proportion
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _terms(s, t, beta, DIVERGENCE: tl.constexpr):
    """Compute the divergence's terms, their slopes, and q.

    The gradient by s is q (slope - mean slope); the slopes of forward KL are the gradient already.
    """
    d = t - s
    q = tl.exp(s)
    p = tl.exp(t)
    bounded = tl.minimum(tl.maximum(d, -FAR), FAR)
    difference = tl.where(tl.abs(d) < NEAR, p * _expm1(-bounded), q - p)
    if DIVERGENCE == FORWARD_KL:
        slopes = difference
        values = p * d + difference
    elif DIVERGENCE == REVERSE_KL:
        slopes = -d
        values = q * slopes - difference
    elif DIVERGENCE == JSD:
        slopes = (beta - 1.0) * _log1p(beta * _expm1(bounded))
        values = q * slopes - beta * p * _log1p((1.0 - beta) * _expm1(-bounded))
    else:
        slopes = tl.where(difference > 0, 0.5, tl.where(difference < 0, -0.5, 0.0))
        values = 0.5 * tl.abs(difference)
    return values, slopes, q


@triton.jit
def _with_block(x, mask, largest, total, softcap, logit_scale, sharpness):
    """Take a block into a running maximum of z and the sum of exp(sharpness (z - maximum))."""
    z = tl.where(mask, apply_softcap(x * logit_scale, softcap), float("-inf"))
    new_max = tl.maximum(largest, tl.max(z, axis=0))
    distance = distance_from_max(x, new_max, softcap, logit_scale)
    distance = tl.where(mask, distance, float("-inf"))
    total = total * tl.exp((largest - new_max) * sharpness)
    return new_max, total + tl.sum(tl.exp(distance * sharpness), axis=0), distance


@triton.jit
def _log_prob(x, mask, largest, log_sum, softcap, logit_scale, sharpness):
    """Compute log-probabilities of raw logits, and z - largest."""
    distance = distance_from_max(x, largest, softcap, logit_scale)
    distance = tl.where(mask, tl.maximum(distance, LEAST), LEAST)
    return distance * sharpness - log_sum, distance


@triton.jit
def _divergence_kernel(
    student_ptr,  # (C, V)
    student_stride,
    teacher_ptr,  # (C, V)
    teacher_stride,
    labels_ptr,  # (C,); None without cross entropy
    row_scale_ptr,  # (C,) factor on each row's gradient; None without gradient
    loss_ptr,  # (C,)
    entropy_ptr,  # (C,) of the student; None where nobody asks for it
    vocab_size,
    softcap,  # or None
    logit_scale,
    teacher_softcap,  # or None
    teacher_logit_scale,
    sharpness,  # 1 / temperature
    beta,
    ce_weight,
    DIVERGENCE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per row: its loss, and in place of the student's logits their gradient."""
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    columns = tl.arange(0, BLOCK_V)
    label = 0
    label_x = 0.0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        label_x = tl.load(student_ptr + label).to(tl.float32)

    s_max = LEAST
    s_sum = 0.0
    t_max = LEAST
    t_sum = 0.0
    others = 0.0  # of exp(z - s_max) without the label's: near p = 1, p - 1 would cancel
    for start in range(0, vocab_size, BLOCK_V):
        mask = start + columns < vocab_size
        x = tl.load(
            student_ptr + start + columns, mask=mask, other=0.0, eviction_policy="evict_last"
        )
        y = tl.load(
            teacher_ptr + start + columns, mask=mask, other=0.0, eviction_policy="evict_last"
        )
        before = s_max
        s_max, s_sum, distance = _with_block(  # pyright: ignore[reportGeneralTypeIssues]
            x.to(tl.float32), mask, s_max, s_sum, softcap, logit_scale, sharpness
        )
        t_max, t_sum, _ = _with_block(
            y.to(tl.float32), mask, t_max, t_sum, teacher_softcap, teacher_logit_scale, sharpness
        )
        if labels_ptr is not None:
            parts = tl.where(columns == label - start, 0.0, tl.exp(distance))
            others = others * tl.exp(before - s_max) + tl.sum(parts, axis=0)
    s_log_sum = tl.log(s_sum)
    t_log_sum = tl.log(t_sum)

    loss = 0.0
    ce_sum = 1.0
    if labels_ptr is not None:
        label_distance = distance_from_max(label_x, s_max, softcap, logit_scale)
        ce_sum = others + tl.exp(label_distance)
        loss += ce_weight * (tl.log(ce_sum) - label_distance)

    mean_slope = 0.0
    entropy = 0.0
    q_sum = 0.0  # 1 up to rounding, which the mean must not have: where q is near 1, it cancels
    if DIVERGENCE != FORWARD_KL or row_scale_ptr is None:
        for start in range(0, vocab_size, BLOCK_V):
            mask = start + columns < vocab_size
            x = tl.load(student_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
            y = tl.load(teacher_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
            s, _ = _log_prob(  # pyright: ignore[reportGeneralTypeIssues]
                x, mask, s_max, s_log_sum, softcap, logit_scale, sharpness
            )
            t, _ = _log_prob(
                y, mask, t_max, t_log_sum, teacher_softcap, teacher_logit_scale, sharpness
            )
            values, slopes, q = _terms(s, t, beta, DIVERGENCE)  # pyright: ignore
            loss += tl.sum(values, axis=0)
            if entropy_ptr is not None:
                entropy -= tl.sum(q * s, axis=0)
            if DIVERGENCE != FORWARD_KL:
                mean_slope += tl.sum(q * slopes, axis=0)
                q_sum += tl.sum(q, axis=0)

    if row_scale_ptr is not None:
        tl.debug_barrier()  # every warp has read the label's logit before any warp overwrites it
        scale = tl.load(row_scale_ptr + row) * logit_scale
        for start in range(0, vocab_size, BLOCK_V):
            mask = start + columns < vocab_size
            x = tl.load(student_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
            y = tl.load(teacher_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
            s, distance = _log_prob(  # pyright: ignore[reportGeneralTypeIssues]
                x, mask, s_max, s_log_sum, softcap, logit_scale, sharpness
            )
            t, _ = _log_prob(
                y, mask, t_max, t_log_sum, teacher_softcap, teacher_logit_scale, sharpness
            )
            values, slopes, q = _terms(s, t, beta, DIVERGENCE)  # pyright: ignore
            gradient = slopes
            if DIVERGENCE == FORWARD_KL:
                loss += tl.sum(values, axis=0)
                if entropy_ptr is not None:
                    entropy -= tl.sum(q * s, axis=0)
            else:
                gradient = q * (slopes - mean_slope / q_sum)
            gradient *= sharpness
            if labels_ptr is not None:
                of_label = tl.where(columns == label - start, -others, tl.exp(distance))
                gradient += ce_weight / ce_sum * of_label
            if softcap is not None:
                gradient *= tanh_derivative(x * logit_scale / softcap)
            tl.store(student_ptr + start + columns, gradient * scale, mask=mask)
    tl.store(loss_ptr + row, loss)
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, entropy)


def block_and_warps(vocab_size: int, warp_size: int = 32) -> tuple[int, int]:
    """Return logits of each row per block, and warps per program."""
    block_v = min(MAX_BLOCK_V, 1 << (vocab_size - 1).bit_length())
    return block_v, max(1, block_v // ELEMENTS_PER_THREAD // warp_size)


def divergence_rows_(
    student: Tensor,  # (C, V)
    teacher: Tensor,  # (C, V)
    labels: Tensor,  # (C,)
    options: LossOptions,
    teacher_options: LossOptions,
    divergence: Divergence,
    row_scale: Tensor | None,  # (C,) float32
    entropies: Tensor | None,  # (C,) float32
) -> Tensor:
    """Return the losses (C,) in float32, and write the entropies. With ``row_scale``, overwrite the
    student's logits with the gradient of ``row_scale * losses``.
    """
    rows, vocab_size = student.shape
    losses = torch.empty(rows, dtype=torch.float32, device=student.device)
    if rows == 0:
        return losses
    block_v, num_warps = block_and_warps(vocab_size, 64 if torch.version.hip else 32)
    launch(
        _divergence_kernel,
        (rows,),
        student,
        student.stride(0),
        teacher,
        teacher.stride(0),
        labels.contiguous() if divergence.ce_weight else None,
        None if row_scale is None else row_scale.contiguous(),
        losses,
        entropies,
        vocab_size,
        options.softcap,
        options.logit_scale,
        teacher_options.softcap,
        teacher_options.logit_scale,
        1.0 / divergence.temperature,
        float(divergence.beta),
        float(divergence.ce_weight),
        DIVERGENCE=DIVERGENCES.index(divergence.form),
        BLOCK_V=block_v,
        num_warps=num_warps,
    )
    return losses
