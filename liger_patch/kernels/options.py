"""What is computed per token between a row of logits and its loss.

    z      = logit_scale * x, or softcap * tanh(logit_scale * x / softcap)
    lse    = log(sum_v exp(z_v))
    loss   = (1 - e) * w_y * (lse - z_y) + e / V * sum_v w_v * (lse - z_v) + z_loss * lse ** 2

with x a row of logits (V,), y its label, w the class weights (1 where there are none), e the label
smoothing.
"""

import math
import sys
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

MAX_FLOAT = sys.float_info.max


@dataclass(frozen=True)
class LossOptions:
    """The options of one loss.

    Attributes:
        ignore_index: label of the tokens that are not supervised.
        softcap: bound of the logits, > 0; None for none.
        logit_scale: factor on the raw logits, before the softcap.
        label_smoothing: share of the target spread evenly over the vocabulary, in [0, 1].
        z_loss: factor on ``lse ** 2``, >= 0.
        class_weight: (V,) factor on each class as in ``torch.nn.functional.cross_entropy``.

    Raises:
        ValueError: names the option, its value and what was expected.
    """

    ignore_index: int = -100
    softcap: float | None = None
    logit_scale: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    class_weight: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.ignore_index, Integral) or not -(2**63) <= self.ignore_index < 2**63:
            raise ValueError(f"ignore_index must be a 64-bit integer, got {self.ignore_index!r}")
        for name in ("softcap", "logit_scale", "label_smoothing", "z_loss"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number and not (name == "softcap" and value is None):
                raise ValueError(f"{name} must be a number, got {value!r}")
        if self.softcap is not None and not (self.softcap > 0 and is_finite(self.softcap)):
            raise ValueError(f"softcap must be a finite number > 0 or None, got {self.softcap}")
        if not is_finite(self.logit_scale):
            raise ValueError(f"logit_scale must be finite, got {self.logit_scale}")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1], got {self.label_smoothing}")
        if not (self.z_loss >= 0 and is_finite(self.z_loss)):
            raise ValueError(f"z_loss must be a finite number >= 0, got {self.z_loss}")

    def check(self, vocab_size: int, device: torch.device) -> None:
        """Raise ValueError unless the class weights fit a vocabulary of ``vocab_size`` on
        ``device``.
        """
        weight = self.class_weight
        if weight is None:
            return
        if tuple(weight.shape) != (vocab_size,):
            raise ValueError(
                f"class_weight must have shape ({vocab_size},), got {tuple(weight.shape)}"
            )
        if weight.device != device:
            raise ValueError(f"class_weight must be on {device}, got {weight.device}")
        if not weight.is_floating_point():
            raise ValueError(f"class_weight must be a floating-point tensor, got {weight.dtype}")
        if weight.requires_grad:
            raise ValueError("class_weight must not require a gradient: none is computed for it")


def is_finite(value: float) -> bool:
    """Return True if a number is finite as a float: an int may be too large for one."""
    if isinstance(value, int):
        return abs(value) <= MAX_FLOAT
    return -math.inf < value < math.inf  # not math.isfinite: a graph has symbols for numbers
