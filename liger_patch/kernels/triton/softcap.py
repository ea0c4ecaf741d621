"""Softcap of logits in float32, for the Triton kernels that walk rows of logits:

    z = softcap * tanh(x / softcap)

and the tanh, with its derivative, that gelu takes too.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Compute tanh to float32's last digits, near 0 too."""
    # (1 - e) / (1 + e) cancels near 0, where the series takes over: to x^9 it is off by 5e-8 at 0.3
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    x2 = x * x
    near = x * (1.0 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far))


@triton.jit
def tanh_derivative(x):
    """Compute the derivative of tanh at x, without cancellation where it nears 0."""
    e = tl.exp(-2.0 * tl.abs(x))  # 1 - tanh(x)^2 would cancel
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def apply_softcap(x, softcap):
    """Compute ``softcap * tanh(x / softcap)``, or x where it is None."""
    z = x
    if softcap is not None:
        z = softcap * tanh(x / softcap)
    return z


@triton.jit
def distance_from_max(x, largest, softcap, logit_scale):
    """Compute z - largest of raw logits x, by the same fused multiply-add in every walk of a row.

    Were the compiler free to fuse it in one and not in the other, the probabilities of a row would
    sum to 1 up to the last digit of the largest logit, not of 1.
    """
    if softcap is not None:
        distance = tl.fma(tanh(x * logit_scale / softcap), softcap, -largest)
    else:
        distance = tl.fma(x, logit_scale, -largest)
    return distance
