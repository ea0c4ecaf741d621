"""Triton form of the divergence of rows of logits. The formulas are in ``head/divergences``.

One program walks a row of both once for the log-sum-exps, with running maxima; once for the
divergence and the mean slope; and once to turn each of the student's logits into its gradient. The
last two walks are one for forward KL, whose gradient q - p needs no mean. Each walk turns back
where the one before it ended, and finds there what is left in the L2 cache.

Instructions take the time, 128 for each pair of bf16 logits of the JSD: so exponentials are in
base 2, logarithms have no path for 0, and no thread waits for another's sums. Log-probabilities
are in base 2 here, times the sharpness 1 / temperature. C: rows, V: classes of both. Extra memory:
one float a row. Running maximum: Milakov and Gimelshein (arXiv:1805.02867).
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_patch.kernels.options import LossOptions
from liger_patch.kernels.triton.launch import launch
from liger_patch.kernels.triton.softcap import tanh, tanh_derivative

MAX_THREADS = 256  # JSD of 2048 rows on an H100 takes 1.47 ms, with 512 1.71
VECTOR_BYTES = 16  # of a row that a thread loads at once
LOG2_E = math.log2(math.e)
TINY = 1e-37  # factor in place of 0
LN_2 = tl.constexpr(math.log(2.0))
LEAST = tl.constexpr(-1e30)  # LOWEST of ``head/divergences``, where it is explained
NEAR = tl.constexpr(0.25)  # |d| up to which series are nearer to the truth than differences
FORWARD_KL, REVERSE_KL, JSD = (tl.constexpr(i) for i in range(3))  # places in ``head/divergences``


@triton.jit
def _log(y):
    """Compute log(y) of y > 0, off by 3e-7 of itself, in half the time of ``tl.log``."""
    bits = y.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) & -0x800000  # y = 2^k (1 + m), 1 + m from sqrt(1 / 2) to sqrt(2)
    m = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    high = -0.17243242 + m * (0.1618048 - 0.10082287 * m)  # least relative error, by Remez
    series = -0.5000032 + m * (0.33334714 + m * (-0.24971227 + m * (0.19906886 + m * high)))
    return exponent.to(tl.float32) * (LN_2 / 0x800000) + (m + m * m * series)


@triton.jit
def _terms(s, t, bits, beta, DIVERGENCE: tl.constexpr):
    """Compute the divergence's terms, their slopes, and q; ``bits`` is t - s in base 2.

    The gradient by s is q (slope - mean slope), times 1 - beta for the JSD; the slopes of forward
    KL are the gradient already.
    """
    larger = tl.exp2(tl.maximum(s, t))
    ratio = tl.exp2(-tl.abs(bits))  # of the smaller probability to the larger
    q = tl.where(bits > 0, larger * ratio, larger)
    p = tl.where(bits > 0, larger, larger * ratio)
    d = bits * LN_2
    a = tl.abs(d)
    if DIVERGENCE == JSD:
        share = tl.where(bits > 0, beta, 1.0 - beta)  # of the larger in the mixture m
        rest = ratio - ratio * share
        mixture = share + rest  # over the larger
        log_mixture = _log(mixture)
        # log(m / q) is the cumulant generating function of a Bernoulli variable: off by 7e-7 of
        # itself at NEAR for beta = 0.5. The divergence is off by 4e-6, and does not cancel
        variance = beta * (1.0 - beta)
        tilt = 1.0 - 2.0 * beta
        quartic = variance * (1.0 - 6.0 * variance) / 24
        near = d * (beta + d * (variance / 2 + d * (variance * tilt / 6 + d * quartic)))
        middle = tl.exp2(s + bits * ((2.0 - beta) / 3))
        near_values = middle * (d * d) * (variance / 2 + d * d * (variance * tilt * tilt / 72))
        far_values = -larger * (log_mixture * mixture + rest * a)
        slopes = -tl.where(a < NEAR, near, log_mixture + tl.maximum(d, 0.0))
        values = tl.where(a < NEAR, near_values, far_values)
    else:
        # 1 - ratio; the series to a^6 is off by 5e-8 at NEAR
        series = 1 / 6 + a * (-1 / 24 + a * (1 / 120 - a * (1 / 720)))
        series = a * (1.0 + a * (-0.5 + a * series))
        distance = larger * tl.where(a < NEAR, series, 1.0 - ratio)
        difference = tl.where(bits > 0, -distance, distance)  # q - p
        if DIVERGENCE == FORWARD_KL:
            slopes = difference
            values = p * d + difference
        elif DIVERGENCE == REVERSE_KL:
            slopes = -d
            values = q * slopes - difference
        else:
            slopes = tl.where(difference > 0, 0.5, tl.where(difference < 0, -0.5, 0.0))
            values = 0.5 * distance
    return values, slopes, q


@triton.jit
def _load(row_ptr, places, width, vocab_size, factor, softcap, logit_scale):
    """Load raw logits as x, and as u, which ``factor`` turns into z: -infinity past the last."""
    x = tl.load(row_ptr + places, mask=places < width, other=0.0).to(tl.float32)
    u = x
    if softcap is not None:
        u = tanh(x * logit_scale / softcap)
    past = tl.where(factor > 0, float("-inf"), float("inf"))
    return x, tl.where(places < vocab_size, u, past)


@triton.jit
def _with_block(u, largest, total, factor):
    """Take a block into each thread's running maximum of z and sum of exp2(z - maximum)."""
    new_max = tl.maximum(largest, tl.max(u * factor, axis=1))
    distance = tl.fma(u, factor, -new_max[:, None])
    total = total * tl.exp2(largest - new_max)
    return new_max, total + tl.sum(tl.exp2(distance), axis=1), distance


@triton.jit
def _log_prob(u, largest, log_sum, factor):
    """Compute log-probabilities in base 2, and z - largest as ``_with_block`` has it: or the
    probabilities would sum to 1 up to the last digit of the largest logit, not of 1.
    """
    distance = tl.maximum(tl.fma(u, factor, -largest), LEAST)
    return distance - log_sum, distance


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
    width,  # up to which rows can be read, >= vocab_size
    softcap,  # or None
    logit_scale,
    factor,  # on raw logits, or on tanh of the softcap: z in base 2 over the temperature
    t_softcap,  # of the teacher, or None
    t_scale,
    t_factor,
    temperature,
    beta,
    ce_weight,
    DIVERGENCE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One program per row: its loss, and in place of the student's logits their gradient."""
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    # a thread has one row of this block, and no other's numbers until a walk ends
    columns = tl.arange(0, BLOCK_V // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    zeros = tl.zeros((BLOCK_V // VECTOR,), dtype=tl.float32)
    last = (vocab_size - 1) // BLOCK_V * BLOCK_V
    label = 0
    label_x = 0.0
    if labels_ptr is not None:
        label = tl.load(labels_ptr + row)
        label_x = tl.load(student_ptr + label).to(tl.float32)

    s_maxima = zeros + LEAST
    s_sums = zeros
    t_maxima = zeros + LEAST
    t_sums = zeros
    other_sums = zeros  # of exp(z - s_max) without the label's: near p = 1, p - 1 would cancel
    for start in range(0, vocab_size, BLOCK_V):
        places = start + columns
        _, u = _load(student_ptr, places, width, vocab_size, factor, softcap, logit_scale)
        _, v = _load(teacher_ptr, places, width, vocab_size, t_factor, t_softcap, t_scale)
        before = s_maxima
        s_maxima, s_sums, distance = _with_block(u, s_maxima, s_sums, factor)
        t_maxima, t_sums, _ = _with_block(v, t_maxima, t_sums, t_factor)
        if labels_ptr is not None:
            parts = tl.where(places == label, 0.0, tl.exp2(distance * temperature))
            other_sums *= tl.exp2((before - s_maxima) * temperature)
            other_sums += tl.sum(parts, axis=1)
    s_max = tl.max(s_maxima, axis=0)
    t_max = tl.max(t_maxima, axis=0)
    s_log_sum = tl.log2(tl.sum(s_sums * tl.exp2(s_maxima - s_max), axis=0))
    t_log_sum = tl.log2(tl.sum(t_sums * tl.exp2(t_maxima - t_max), axis=0))

    offset = s_log_sum - t_log_sum  # t - s has fewer roundings by it

    loss = 0.0
    others = 0.0
    ce_sum = 1.0
    if labels_ptr is not None:
        others = tl.sum(other_sums * tl.exp2((s_maxima - s_max) * temperature), axis=0)
        label_u = label_x
        if softcap is not None:
            label_u = tanh(label_x * logit_scale / softcap)
        label_distance = tl.fma(label_u, factor, -s_max) * temperature
        ce_sum = others + tl.exp2(label_distance)
        loss = ce_weight * (tl.log(ce_sum) - label_distance * LN_2)

    mean_slope = 0.0
    values_sums = zeros
    entropy_sums = zeros
    if DIVERGENCE != FORWARD_KL or row_scale_ptr is None:
        slope_sums = zeros
        q_sums = zeros  # to 1 but for rounding, which the mean must not have: near q = 1 it cancels
        for back in range(0, vocab_size, BLOCK_V):
            places = last - back + columns
            _, u = _load(student_ptr, places, width, vocab_size, factor, softcap, logit_scale)
            _, v = _load(teacher_ptr, places, width, vocab_size, t_factor, t_softcap, t_scale)
            s, distance = _log_prob(u, s_max, s_log_sum, factor)
            t, t_distance = _log_prob(v, t_max, t_log_sum, t_factor)
            bits = t_distance - distance + offset
            values, slopes, q = _terms(s, t, bits, beta, DIVERGENCE)
            values_sums += tl.sum(values, axis=1)
            if entropy_ptr is not None:
                entropy_sums -= tl.sum(q * s, axis=1)
            if DIVERGENCE != FORWARD_KL:
                slope_sums += tl.sum(q * slopes, axis=1)
                q_sums += tl.sum(q, axis=1)
        if DIVERGENCE != FORWARD_KL:
            mean_slope = tl.sum(slope_sums, axis=0) / tl.sum(q_sums, axis=0)

    if row_scale_ptr is not None:
        tl.debug_barrier()  # every warp has read the label's logit before any warp overwrites it
        ce_scale = tl.load(row_scale_ptr + row) * logit_scale
        scale = ce_scale / temperature
        if DIVERGENCE == JSD:
            scale *= 1.0 - beta
        ce_scale *= ce_weight / ce_sum
        for walked in range(0, vocab_size, BLOCK_V):
            places = walked + columns
            if DIVERGENCE == FORWARD_KL:
                places = last - walked + columns
            x, u = _load(student_ptr, places, width, vocab_size, factor, softcap, logit_scale)
            _, v = _load(teacher_ptr, places, width, vocab_size, t_factor, t_softcap, t_scale)
            s, distance = _log_prob(u, s_max, s_log_sum, factor)
            t, t_distance = _log_prob(v, t_max, t_log_sum, t_factor)
            bits = t_distance - distance + offset
            values, slopes, q = _terms(s, t, bits, beta, DIVERGENCE)
            if DIVERGENCE == FORWARD_KL:
                values_sums += tl.sum(values, axis=1)
                if entropy_ptr is not None:
                    entropy_sums -= tl.sum(q * s, axis=1)
                gradient = slopes * scale
            else:
                gradient = q * (slopes - mean_slope) * scale
            if labels_ptr is not None:
                of_label = tl.where(places == label, -others, tl.exp2(distance * temperature))
                gradient += ce_scale * of_label
            if softcap is not None:
                gradient *= tanh_derivative(x * logit_scale / softcap)
            tl.store(student_ptr + places, gradient, mask=places < vocab_size)
    tl.store(loss_ptr + row, loss + tl.sum(values_sums, axis=0))
    if entropy_ptr is not None:
        tl.store(entropy_ptr + row, tl.sum(entropy_sums, axis=0) * LN_2)


def block_and_warps(
    vocab_size: int, warp_size: int = 32, itemsize: int = 2
) -> tuple[int, int, int]:
    """Return logits of each row per block, warps per program, and logits per load of a thread."""
    vector = VECTOR_BYTES // itemsize
    threads = min(MAX_THREADS, max(warp_size, 1 << (-(-vocab_size // vector) - 1).bit_length()))
    return threads * vector, threads // warp_size, vector


def divergence_rows_(
    student: Tensor,  # (C, V)
    teacher: Tensor,  # (C, V)
    labels: Tensor,  # (C,)
    options: LossOptions,
    teacher_options: LossOptions,
    form: int,
    temperature: float,
    beta: float,
    ce_weight: float,
    row_scale: Tensor | None,  # (C,) float32
    entropies: Tensor | None,  # (C,) float32
) -> Tensor:
    """Return the losses (C,) in float32, and write the entropies. With ``row_scale``, overwrite the
    student's logits with the gradient of ``row_scale * losses``.

    Args:
        form: place of the divergence in ``DIVERGENCES`` of ``head/divergences``.
    """
    rows, vocab_size = student.shape
    losses = torch.empty(rows, dtype=torch.float32, device=student.device)
    if rows == 0:
        return losses
    itemsize = max(student.element_size(), teacher.element_size())
    warp_size = 64 if torch.version.hip else 32
    block_v, num_warps, vector = block_and_warps(vocab_size, warp_size, itemsize)
    # what is no multiple of 16 would be loaded one by one
    width = -(-vocab_size // 16) * 16
    if width > min(student.stride(0), teacher.stride(0)):
        width = vocab_size
    launch(
        _divergence_kernel,
        (rows,),
        student,
        student.stride(0),
        teacher,
        teacher.stride(0),
        labels.contiguous() if ce_weight else None,
        None if row_scale is None else row_scale.contiguous(),
        losses,
        entropies,
        vocab_size,
        width,
        *_scales(options, temperature),
        *_scales(teacher_options, temperature),
        float(temperature),
        float(beta),
        float(ce_weight),
        DIVERGENCE=form,
        BLOCK_V=block_v,
        VECTOR=vector,
        num_warps=num_warps,
    )
    return losses


def _scales(options: LossOptions, temperature: float) -> tuple[float | None, float, float]:
    """Return softcap, logit scale and factor of the kernel."""
    cap, scale = options.softcap, options.logit_scale
    # 0 times the infinity of a block's padding would be nan
    factor = (cap or scale) / temperature * LOG2_E or TINY
    return cap, scale, factor
