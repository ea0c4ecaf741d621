"""The classes of norms on kernels, each made of a norm's own class.

What the kernel must know of a class stands in NORMS, and is tried on a few numbers before a norm is
replaced: another version of Transformers may compute something else under the same name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_patch.kernels.rms_norm import rms_norm
from liger_patch.layers.checks import is_transformers, needs_own_code
from liger_patch.layers.probing import configuration, results_match
from liger_patch.subclass import derived_class, once_for_each_class


class Norm(NamedTuple):
    """How a class computes its norm. One without a weight (or ``with_scale``) scales nothing."""

    eps: str = "variance_epsilon"  # the attribute
    offset: float = 0.0  # added to the weight
    promotes: bool = False  # the weight's dtype takes part in the result's


PROBED = 8  # features of the input that a norm is tried on
LLAMA_NORM = Norm(promotes=True)
GEMMA_NORM = Norm("eps", offset=1.0)
UNSHIFTED_GEMMA_NORM = Norm("eps")
NORMS = {  # of the classes that are not like Llama's
    "Gemma2RMSNorm": GEMMA_NORM,
    "Gemma3RMSNorm": GEMMA_NORM,
    "Gemma3nRMSNorm": UNSHIFTED_GEMMA_NORM,
    "Gemma4RMSNorm": UNSHIFTED_GEMMA_NORM,
    "Gemma4UnifiedRMSNorm": UNSHIFTED_GEMMA_NORM,
    "GemmaRMSNorm": GEMMA_NORM,
    "Llama4TextL2Norm": Norm("eps"),
    "Llama4TextRMSNorm": Norm("eps", promotes=True),
    "Olmo2RMSNorm": Norm(),
    "Olmo3RMSNorm": Norm(),
    "Qwen3NextRMSNorm": GEMMA_NORM,
    "Qwen3_5MoeRMSNorm": GEMMA_NORM,
    "Qwen3_5RMSNorm": GEMMA_NORM,
    "Qwen4ExpTextRMSNorm": GEMMA_NORM,
    "RecurrentGemmaRMSNorm": GEMMA_NORM,
    "VaultGemmaRMSNorm": GEMMA_NORM,
}


def norm_class(module: Any) -> Any:
    """The class of a norm on a kernel; None where it norms groups of features, computes anything
    else than NORMS says, or is not Transformers'.
    """
    norms_groups = getattr(module, "group_size", None) is not None
    if norms_groups or not is_transformers(type(module).forward):
        return None
    replacement = norm(type(module))
    return replacement if _agree(module, replacement) else None


def norm_configuration(module: Any) -> Hashable:
    """Return what ``norm_class`` depends on: equal configurations have the same class."""
    weight = getattr(module, "weight", None)
    rank = getattr(weight, "ndim", None)
    return configuration(module, without=("weight",)), type(weight), rank


def _agree(module: Any, replacement: Any) -> bool:
    """Whether both classes make the same of a small input."""

    def results(forward: Callable[..., Tensor]) -> list[Tensor]:
        probe = _with_few_features(module)
        # so small that epsilon counts
        x = 1e-3 * torch.linspace(-1.0, 2.0, PROBED, dtype=torch.float32)
        return [forward(probe, x.to(dtype)) for dtype in (torch.float32, torch.bfloat16)]

    return results_match(
        lambda: results(type(module).forward), lambda: results(replacement.forward)
    )


def _with_few_features(module: Any) -> Any:
    """The module with another weight, whatever holds its own (FSDP: an attribute)."""
    probe = copy.copy(module)
    probe._parameters, probe._buffers = dict(module._parameters), dict(module._buffers)
    own = getattr(module, "weight", None)
    if own is not None:
        del probe.weight
        weight = torch.linspace(0.5, 2.0, PROBED, dtype=torch.float32)
        if own.dim() == 0:  # Gemma 3n's 1.0 where there is no scale, in older versions
            weight = torch.ones((), dtype=torch.float32)
        probe.register_parameter("weight", nn.Parameter(weight))
    return probe


@once_for_each_class
def norm(original: Any) -> type[nn.Module]:
    """A norm that is one call."""
    eps, offset, promotes = NORMS.get(original.__name__, LLAMA_NORM)

    def forward(self, x: Tensor) -> Tensor:
        weight, dtype = getattr(self, "weight", None), x.dtype
        if needs_own_code(x, weight):
            return original.forward(self, x)
        # most have no with_scale, which nn.Module's own lookup would take longer to find out
        if not self.__dict__.get("with_scale", True):
            weight = None  # where Transformers 5.0 has 1.0
        if weight is not None and promotes:
            dtype = torch.promote_types(dtype, weight.dtype)
        return rms_norm(x, weight, getattr(self, eps), offset=offset, dtype=dtype)

    return derived_class(original, norm, forward=forward, _liger_patch_layer="rms_norm")
