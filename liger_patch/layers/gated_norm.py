"""Derive the classes of norms with a gate on kernels, each from a norm's own class.

GATED_NORMS says what the kernel must know of a class. A probe tests it before a norm is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_patch.kernels.gated_norm import run_gated_norm
from liger_patch.layers.checks import is_left_to_model, needs_own_code
from liger_patch.layers.probing import results_match, with_weight
from liger_patch.subclass import derived_class, is_transformers, once_for_each_class, own_name


class GatedNorm(NamedTuple):
    """Describe how a class computes its norm.

    Two attributes of a norm, where it has them, overrule this: ``norm_before_gate`` says whether
    the gate is behind the norm, and ``activation`` names the activation, which is silu otherwise.
    """

    gate_first: bool = False  # the gate is in front of the norm
    group_size: str = ""  # the name of the attribute; all features are one group without it
    groups: str = ""  # the attribute that holds their number instead
    promotes: bool = False  # the result has the promoted dtype of input and weight


PROBED = 8  # features of a group of a probe's input
PROBED_DTYPES = torch.float32, torch.bfloat16  # of inputs and of weights
ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
DELTA_NORM = GatedNorm()
MAMBA_NORM = GatedNorm(gate_first=True, group_size="group_size", promotes=True)
GATED_NORMS = {
    "BailingHybridRMSNormGated": DELTA_NORM,
    "BambaRMSNormGated": MAMBA_NORM,
    "FalconH1RMSNormGated": GatedNorm(groups="n_groups"),
    "GraniteMoeHybridRMSNormGated": MAMBA_NORM,
    "KimiLinearRMSNormGated": DELTA_NORM,
    "MambaRMSNormGated": MAMBA_NORM,
    "NemotronHRMSNormGated": MAMBA_NORM,
    "OlmoHybridRMSNormGated": DELTA_NORM,
    "Qwen3NextRMSNormGated": DELTA_NORM,
    "Qwen3_5MoeRMSNormGated": DELTA_NORM,
    "Qwen3_5RMSNormGated": DELTA_NORM,
    "Qwen4ExpTextRMSNormGated": DELTA_NORM,
    "Zamba2RMSNormGated": MAMBA_NORM,
}


def gated_norm_class(module: Any) -> Any:
    """Return the class that puts a norm with a gate on a kernel, or None.

    It is None where the norm computes something else than GATED_NORMS says, and where its code is
    not Transformers' own.
    """
    form = GATED_NORMS.get(own_name(type(module)))
    if form is None or not is_transformers(type(module).forward):
        return None
    if getattr(module, "activation", "silu") not in ACTIVATIONS:
        return None
    replacement = norm_with_gate(type(module))
    return replacement if _agree(module, form, replacement) else None


def _agree(module: Any, form: GatedNorm, replacement: Any) -> bool:
    """Return whether both classes compute the same from a small input."""
    groups = 2 if form.group_size in vars(module) else getattr(module, form.groups, 1)
    features = groups * PROBED

    def results(forward: Callable[..., Tensor]) -> list[Tensor]:
        # so small that epsilon matters
        x = 1e-3 * torch.linspace(-1.0, 2.0, 2 * features, dtype=torch.float32).view(1, 2, -1)
        gate = torch.linspace(-3.0, 2.0, 2 * features, dtype=torch.float32).sin().view(1, 2, -1)
        probes = [_with_few_features(module, form, features, dtype) for dtype in PROBED_DTYPES]
        return [forward(p, x.to(d), gate.to(d)) for p in probes for d in PROBED_DTYPES]

    return results_match(
        lambda: results(type(module).forward), lambda: results(replacement.forward)
    )


def _with_few_features(module: Any, form: GatedNorm, features: int, dtype: torch.dtype) -> Any:
    """Return a copy with a weight of few features, in groups of PROBED."""
    weight = torch.linspace(0.5, 2.0, features, dtype=torch.float32)
    probe = with_weight(module, weight.to(dtype))
    if form.group_size in vars(module):
        setattr(probe, form.group_size, PROBED)
    return probe


@once_for_each_class
def norm_with_gate(original: Any) -> type[nn.Module]:
    """Derive the class of a norm with a gate whose forward is one call of the kernel."""
    form = GATED_NORMS[own_name(original)]

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        x, weight, own = hidden_states, self.weight, self.__dict__
        if gate is None or is_left_to_model(self, x):
            return original.forward(self, x, gate)
        activation = ACTIVATIONS.get(own.get("activation", "silu"))
        group_size = own.get(form.group_size, x.shape[-1] // own.get(form.groups, 1))
        fits = gate.shape == x.shape and weight.shape == x.shape[-1:]
        fits = fits and x.shape[-1] % group_size == 0
        if activation is None or not fits or needs_own_code(x, gate, weight):
            return original.forward(self, x, gate)
        gate_first = not own.get("norm_before_gate", not form.gate_first)
        dtype = torch.promote_types(x.dtype, weight.dtype) if form.promotes else x.dtype
        how = self.variance_epsilon, group_size, activation, gate_first, dtype
        return run_gated_norm(x, gate, weight, *how)

    return derived_class(
        original, norm_with_gate, forward=forward, _liger_patch_layers=("rms_norm",)
    )
