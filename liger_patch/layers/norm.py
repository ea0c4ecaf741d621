"""Derive the classes of norms on kernels, each from a norm's own class.

NORMS, and GATED_NORMS of those with a gate, say what the kernel must know of a class. A probe tests
it before a norm is replaced: another version of Transformers may compute something else under the
same name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_patch.kernels.gated_norm import run_gated_norm
from liger_patch.kernels.rms_norm import run_rms_norm
from liger_patch.layers.checks import (
    configuration,
    is_left_to_model,
    needs_own_code,
    probe_of,
    results_match,
    with_weight,
)
from liger_patch.layers.long_rows import is_checkpointed, note_source
from liger_patch.subclass import derived_class, is_transformers, once_for_each_class, own_name


class Norm(NamedTuple):
    """Describe how a class computes its norm.

    A norm scales its result unless it has no weight, or a false ``with_scale``.
    """

    eps: str = "variance_epsilon"  # the name of the attribute
    offset: float = 0.0  # added to the weight
    promotes: bool = False  # the result has the promoted dtype of input and weight
    narrows: bool = False  # the result has the dtype of the weight where that has 16 bits
    scales: bool = True  # False: the weight is not used


class GatedNorm(NamedTuple):
    """Describe how a class computes its norm with a gate.

    Two attributes of a norm, where it has them, overrule this: ``norm_before_gate`` says whether
    the gate is behind the norm, and ``activation`` names the activation, which is silu otherwise.
    """

    gate_first: bool = False  # the gate is in front of the norm
    group_size: str = ""  # the name of the attribute; all features are one group without it
    groups: str = ""  # the attribute that holds their number instead
    promotes: bool = False  # the result has the promoted dtype of input and weight


PROBED = 8  # features of a probe's input
PROBED_DTYPES = torch.float32, torch.bfloat16  # of inputs and of weights
LLAMA_NORM = Norm(promotes=True)
GEMMA_NORM = Norm("eps", offset=1.0)
UNSHIFTED_GEMMA_NORM = Norm("eps")
OLMO_NORM = Norm()
T5_NORM = Norm(promotes=True, narrows=True)
NORMS = {  # of the classes that are not like Llama's
    "AfmoeRMSNorm": OLMO_NORM,
    "BeamRMSNorm": OLMO_NORM,
    "DeepseekV4RMSNorm": OLMO_NORM,
    "DeepseekV4UnweightedRMSNorm": Norm("eps"),
    "FalconMambaWeightlessRMSNorm": Norm("eps", scales=False),
    "FlexOlmoRMSNorm": OLMO_NORM,
    "FlintRMSNorm": OLMO_NORM,
    "Gemma2RMSNorm": GEMMA_NORM,
    "Gemma3RMSNorm": GEMMA_NORM,
    "Gemma3nRMSNorm": UNSHIFTED_GEMMA_NORM,
    "Gemma4RMSNorm": UNSHIFTED_GEMMA_NORM,
    "Gemma4UnifiedRMSNorm": UNSHIFTED_GEMMA_NORM,
    "GemmaRMSNorm": GEMMA_NORM,
    "GptOssRMSNorm": OLMO_NORM,
    "HeliumRMSNorm": OLMO_NORM,
    "HrmTextRMSNorm": Norm("eps"),
    "Kosmos2_5LayerNorm": T5_NORM,
    "Llama4TextL2Norm": Norm("eps"),
    "Llama4TextRMSNorm": Norm("eps", promotes=True),
    "LongT5LayerNorm": T5_NORM,
    "MT5LayerNorm": T5_NORM,
    "MiniMaxM3VLRMSNorm": GEMMA_NORM,
    "MoshiRMSNorm": UNSHIFTED_GEMMA_NORM,
    "MuseGlimmerRMSNorm": UNSHIFTED_GEMMA_NORM,
    "MuseGlimmerTextCenteredRMSNorm": GEMMA_NORM,
    "NanoChatRMSNorm": Norm("eps"),
    "NemotronHRMSNorm": OLMO_NORM,
    "Olmo2RMSNorm": OLMO_NORM,
    "Olmo3RMSNorm": OLMO_NORM,
    "OlmoHybridRMSNorm": OLMO_NORM,
    "Pop2PianoLayerNorm": T5_NORM,
    "Qwen3NextRMSNorm": GEMMA_NORM,
    "Qwen3_5MoeRMSNorm": GEMMA_NORM,
    "Qwen3_5RMSNorm": GEMMA_NORM,
    "Qwen4ExpTextRMSNorm": GEMMA_NORM,
    "RecurrentGemmaRMSNorm": GEMMA_NORM,
    "SwitchTransformersLayerNorm": T5_NORM,
    "T5Gemma2RMSNorm": GEMMA_NORM,
    "T5GemmaRMSNorm": GEMMA_NORM,
    "T5LayerNorm": T5_NORM,
    "UMT5LayerNorm": T5_NORM,
    "VaultGemmaRMSNorm": GEMMA_NORM,
    "xLSTMRMSNorm": Norm("eps", promotes=True),
}
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


def norm_class(module: Any) -> Any:
    """Return the class that puts a norm on a kernel, or None.

    It is None where the norm works on groups of features or has parameters beside its weight, where
    it computes something else than NORMS says, and where its code is not Transformers' own.
    """
    if any(p is not None for name, p in module._parameters.items() if name != "weight"):
        return None  # which may be zeros, as a probe then sees no difference
    if own_name(type(module)) in GATED_NORMS:
        return gated_norm_class(module)
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
    """Return whether both classes compute the same from a small input."""

    def results(forward: Callable[..., Tensor]) -> list[Tensor]:
        probes = [_with_few_features(module, dtype) for dtype in PROBED_DTYPES]
        # so small that epsilon matters
        x = 1e-3 * torch.linspace(-1.0, 2.0, PROBED, dtype=torch.float32)
        return [forward(probe, x.to(dtype)) for probe in probes for dtype in PROBED_DTYPES]

    return results_match(
        lambda: results(type(module).forward), lambda: results(replacement.forward)
    )


def _with_few_features(module: Any, dtype: torch.dtype) -> Any:
    """Return a copy with a weight of few features, if the norm has a weight."""
    own = getattr(module, "weight", None)
    if own is None:
        return probe_of(module)
    weight = torch.linspace(0.5, 2.0, PROBED, dtype=torch.float32)
    if own.dim() == 0:  # Gemma 3n without a scale, in Transformers 5.0: the number 1.0
        weight = torch.ones((), dtype=torch.float32)
    return with_weight(module, weight.to(dtype))


@once_for_each_class
def norm(original: Any) -> type[nn.Module]:
    """Derive the class of a norm whose forward is one call of the kernel."""
    eps, offset, promotes, narrows, scales = NORMS.get(own_name(original), LLAMA_NORM)

    def forward(self, x: Tensor) -> Tensor:
        if is_left_to_model(self, x):
            return original.forward(self, x)
        weight, dtype = getattr(self, "weight", None), x.dtype
        # __dict__: most have no with_scale, and nn.Module's own lookup would take longer
        if not scales or not self.__dict__.get("with_scale", True):
            weight = None  # where Transformers 5.0 has 1.0
        is_known = weight is None or weight.shape == x.shape[-1:]
        if not is_known or needs_own_code(x, weight):
            return original.forward(self, x)
        if weight is not None and promotes:
            is_narrow = narrows and weight.dtype in (torch.float16, torch.bfloat16)
            dtype = weight.dtype if is_narrow else torch.promote_types(dtype, weight.dtype)
        epsilon = getattr(self, eps)
        y = run_rms_norm(x, weight, epsilon, offset, dtype)
        if torch.is_grad_enabled() and is_checkpointed():
            note_source(y, x, weight, epsilon, offset, dtype)
        return y

    return derived_class(original, norm, forward=forward, _liger_patch_layers=("rms_norm",))


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
    return replacement if _agree_with_gate(module, form, replacement) else None


def _agree_with_gate(module: Any, form: GatedNorm, replacement: Any) -> bool:
    """Return whether both classes compute the same from a small input."""
    groups = 2 if form.group_size in vars(module) else getattr(module, form.groups, 1)
    features = groups * PROBED

    def results(forward: Callable[..., Tensor]) -> list[Tensor]:
        # so small that epsilon matters
        x = 1e-3 * torch.linspace(-1.0, 2.0, 2 * features, dtype=torch.float32).view(1, 2, -1)
        gate = torch.linspace(-3.0, 2.0, 2 * features, dtype=torch.float32).sin().view(1, 2, -1)
        probes = [_with_few_groups(module, form, features, dtype) for dtype in PROBED_DTYPES]
        return [forward(p, x.to(d), gate.to(d)) for p in probes for d in PROBED_DTYPES]

    return results_match(
        lambda: results(type(module).forward), lambda: results(replacement.forward)
    )


def _with_few_groups(module: Any, form: GatedNorm, features: int, dtype: torch.dtype) -> Any:
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
