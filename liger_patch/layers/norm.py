"""Derive the classes of norms on kernels, each from a norm's own class.

NORMS, and GATED_NORMS with a gate, are the forms that the kernels know. A probe tries which of them
computes what a norm's own code does.
"""

from __future__ import annotations

import functools
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
from liger_patch.subclass import derived_class, is_transformers, once_for_each_class


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
SCALES = 1e-3, 1e3  # of its numbers: epsilon matters, and so would a limit
PROBED_DTYPES = torch.float32, torch.bfloat16  # of inputs and of weights
NORMS = (
    Norm(promotes=True),  # Llama's
    Norm("eps", offset=1.0),  # Gemma's
    Norm("eps"),  # Gemma 4's
    Norm(),  # OLMo's
    Norm("eps", promotes=True),  # Llama 4's
    Norm(promotes=True, narrows=True),  # T5's
    Norm("eps", scales=False),
)
ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
GATED_NORMS = (
    GatedNorm(),  # Qwen3-Next's
    GatedNorm(gate_first=True, group_size="group_size", promotes=True),  # Mamba's
    GatedNorm(groups="n_groups"),  # Falcon-H1's
)


def norm_class(module: Any) -> Any:
    """Return the class that puts a norm on a kernel, or None.

    It is None where the norm has parameters beside its weight, where its code is not Transformers'
    own, and where it computes something else than any of NORMS or GATED_NORMS.
    """
    if any(p is not None for name, p in module._parameters.items() if name != "weight"):
        return None  # which may be zeros, as a probe then sees no difference
    cls = type(module)
    if not is_transformers(cls.forward):
        return None
    if "gate" in cls.forward.__code__.co_varnames:
        if getattr(module, "activation", "silu") not in ACTIVATIONS:
            return None
        gated = ((form, norm_with_gate(form, cls)) for form in GATED_NORMS)
        return next((new for form, new in gated if _agree_with_gate(module, form, new)), None)
    if getattr(module, "group_size", None) is not None:
        return None
    return next((new for form in NORMS if _agree(module, new := norm(form, cls))), None)


def norm_configuration(module: Any) -> Hashable:
    """Return what ``norm_class`` depends on: equal configurations have the same class."""
    weight = getattr(module, "weight", None)
    rank = getattr(weight, "ndim", None)
    return configuration(module, without=("weight",)), type(weight), rank


def _agree(module: Any, replacement: Any) -> bool:
    """Return whether both classes compute the same from a small input."""

    def results(forward: Callable[..., Tensor]) -> list[Tensor]:
        probes = [_with_few_features(module, dtype) for dtype in PROBED_DTYPES]
        x = torch.linspace(-1.0, 2.0, PROBED, dtype=torch.float32)
        xs = [(scale * x).to(dtype) for scale in SCALES for dtype in PROBED_DTYPES]
        return [forward(probe, x) for probe in probes for x in xs]

    return results_match(
        lambda: results(type(module).forward), lambda: results(replacement.forward)
    )


def _with_few_features(module: Any, dtype: torch.dtype) -> Any:
    """Return a copy with a weight of few features, if the norm has a weight."""
    own = getattr(module, "weight", None)
    if own is None:
        return probe_of(module)
    weight = torch.linspace(-8.0, 9.0, PROBED, dtype=torch.float32)
    if own.dim() == 0:  # Gemma 3n without a scale, in Transformers 5.0: the number 1.0
        weight = torch.ones((), dtype=torch.float32)
    return with_weight(module, weight.to(dtype))


@once_for_each_class
def norm(form: Norm, original: Any) -> type[nn.Module]:
    """Derive the class of a norm whose forward is one call of the kernel."""
    eps, offset, promotes, narrows, scales = form

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

    derive = functools.partial(norm, form)
    return derived_class(original, derive, forward=forward, _liger_patch_layers=("rms_norm",))


def _agree_with_gate(module: Any, form: GatedNorm, replacement: Any) -> bool:
    """Return whether both classes compute the same from a small input."""
    groups = 2 if form.group_size in vars(module) else getattr(module, form.groups, 1)
    features = groups * PROBED

    def results(forward: Callable[..., Tensor]) -> list[Tensor]:
        x = torch.linspace(-1.0, 2.0, 2 * features, dtype=torch.float32).view(1, 2, -1)
        gate = torch.linspace(-3.0, 2.0, 2 * features, dtype=torch.float32).sin().view(1, 2, -1)
        probes = [_with_few_groups(module, form, features, dtype) for dtype in PROBED_DTYPES]
        pairs = [((s * x).to(d), gate.to(d)) for s in SCALES for d in PROBED_DTYPES]
        return [forward(probe, *pair) for probe in probes for pair in pairs]

    return results_match(
        lambda: results(type(module).forward), lambda: results(replacement.forward)
    )


def _with_few_groups(module: Any, form: GatedNorm, features: int, dtype: torch.dtype) -> Any:
    """Return a copy with a weight of few features, in groups of PROBED."""
    weight = torch.linspace(-8.0, 9.0, features, dtype=torch.float32)
    probe = with_weight(module, weight.to(dtype))
    if form.group_size in vars(module):
        setattr(probe, form.group_size, PROBED)
    return probe


@once_for_each_class
def norm_with_gate(form: GatedNorm, original: Any) -> type[nn.Module]:
    """Derive the class of a norm with a gate whose forward is one call of the kernel."""

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

    derive = functools.partial(norm_with_gate, form)
    return derived_class(original, derive, forward=forward, _liger_patch_layers=("rms_norm",))
