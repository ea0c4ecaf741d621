"""The layers of one model on the kernels of this package: norms, rotary embeddings, gates.

The model's own code runs: a norm's class is another for that instance, an activation hands its
argument to the product that follows it, and an attention's forward is its own code with another
function under the name ``apply_rotary_pos_emb``.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_patch.instance_class import ORIGINAL, derived_class
from liger_patch.kernels.gated import gated
from liger_patch.kernels.rms_norm import rms_norm
from liger_patch.kernels.rotary import rotary
from liger_patch.registry import Architecture

LAYERS = ("rms_norm", "rotary", "gated")
LAYER_NAME = "_liger_patch_layer"  # attribute of the classes that are made here
ROTARY = "apply_rotary_pos_emb"  # the function that attentions call by this name
ENDINGS = {  # of the classes' names, after what the registry says
    "RMSNorm": "rms_norm",
    "Attention": "rotary",
    "SelfAttention": "rotary",
    "MLP": "gated",
}
ACTIVATION = "act_fn"  # attribute of gated feed-forward layers
# what its classes compute
ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}


def replace_layers(model: nn.Module, row: Architecture, names: frozenset[str]) -> None:
    """Put the layers that the row names on kernels, those of ``names``; the others on their own."""
    restore_layers(model)
    prefixes = row.layers.split()
    for module in list(model.modules()):
        layer = _layer(type(module).__name__, prefixes)
        if layer not in names or "forward" in vars(module):
            continue  # a hook of accelerate holds the forward of the class that it had
        if layer == "rms_norm":
            module.__class__ = NORMS.get(type(module).__name__, llama_norm)(type(module))
        elif layer == "rotary":
            if ROTARY in type(module).forward.__code__.co_names:
                derive = ATTENTIONS.get(type(module).__name__, rotary_attention)
                module.__class__ = derive(type(module))
        elif layer == "gated":
            activation: Any = getattr(module, ACTIVATION, None)
            kind = ACTIVATIONS.get(type(activation).__name__)
            if kind is not None:
                setattr(module, ACTIVATION, GateActivation(activation, kind))


def _layer(class_name: str, prefixes: list[str]) -> str | None:
    for prefix in prefixes:
        if class_name.startswith(prefix):
            return ENDINGS.get(class_name[len(prefix) :])
    return None


def restore_layers(model: nn.Module) -> None:
    """Give every layer its own class and activation back."""
    for module in list(model.modules()):
        if LAYER_NAME in vars(type(module)):
            module.__class__ = getattr(type(module), ORIGINAL)
        for name, child in list(module.named_children()):
            if isinstance(child, GateActivation):
                setattr(module, name, child.original[0])


def count_layers(model: nn.Module) -> dict[str, int]:
    """How many layers of each name are on kernels."""
    counts: dict[str, int] = dict.fromkeys(LAYERS, 0)
    for module in model.modules():
        if isinstance(module, GateActivation):
            counts["gated"] += 1
        elif LAYER_NAME in vars(type(module)):
            counts[getattr(type(module), LAYER_NAME)] += 1
    return counts


@functools.cache
def llama_norm(original: type[nn.Module]) -> type[nn.Module]:
    """Llama's: the weight's dtype takes part in the result's."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, dtype=dtype)

    return derived_class(original, llama_norm, forward=forward, _liger_patch_layer="rms_norm")


@functools.cache
def olmo_norm(original: type[nn.Module]) -> type[nn.Module]:
    """OLMo 2's: as Llama's, in the dtype of its argument."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    return derived_class(original, olmo_norm, forward=forward, _liger_patch_layer="rms_norm")


@functools.cache
def gemma_norm(original: type[nn.Module]) -> type[nn.Module]:
    """Gemma's: 1 is added to the weight."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, offset=1.0)

    return derived_class(original, gemma_norm, forward=forward, _liger_patch_layer="rms_norm")


NORMS = {  # of the classes that are not like Llama's
    "GemmaRMSNorm": gemma_norm,
    "Gemma2RMSNorm": gemma_norm,
    "Gemma3RMSNorm": gemma_norm,
    "Olmo2RMSNorm": olmo_norm,
    "Olmo3RMSNorm": olmo_norm,
    "Qwen3NextRMSNorm": gemma_norm,
    "Qwen3_5MoeRMSNorm": gemma_norm,
    "Qwen3_5RMSNorm": gemma_norm,
    "RecurrentGemmaRMSNorm": gemma_norm,
    "VaultGemmaRMSNorm": gemma_norm,
}


@functools.cache
def rotary_attention(original: type[nn.Module]) -> type[nn.Module]:
    """An attention whose forward calls ``rotary`` where its code says ``apply_rotary_pos_emb``."""
    forward = _with_global(original.forward, ROTARY, _apply_rotary)
    return derived_class(original, rotary_attention, forward=forward, _liger_patch_layer="rotary")


@functools.cache
def olmo_attention(original: type[nn.Module]) -> type[nn.Module]:
    """OLMo 2's: the results have the dtype of queries and keys, however wide the tables are."""
    forward = _with_global(original.forward, ROTARY, _apply_rotary_in_own_dtype)
    return derived_class(original, olmo_attention, forward=forward, _liger_patch_layer="rotary")


ATTENTIONS = {"Olmo2Attention": olmo_attention, "Olmo3Attention": olmo_attention}


def _with_global(function: Any, name: str, value: object) -> Any:
    """The same code, which finds this value under the name."""
    names = {**function.__globals__, name: value}
    # Dynamo would look names up in the module of this name instead
    names.pop("__name__", None)
    other = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    other.__kwdefaults__, other.__annotations__ = function.__kwdefaults__, function.__annotations__
    other.__doc__, other.__qualname__ = function.__doc__, function.__qualname__
    return other


def _apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotary(q, k, cos, sin)


def _apply_rotary_in_own_dtype(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return rotary(q, k, cos, sin, dtype=q.dtype)


class GateActivation(nn.Module):
    """In place of an activation whose result is multiplied by another tensor, nothing else.

    Attributes:
        original: the activation, in a tuple: no child of this module.
        kind: what it computes, see ``gated``.
    """

    def __init__(self, original: nn.Module, kind: str) -> None:
        super().__init__()
        self.original, self.kind = (original,), kind

    def forward(self, gate: Tensor) -> Gate:
        return Gate(gate, self.kind)


@dataclass(frozen=True)
class Gate:
    """The activation of a tensor, computed with the product that it is for."""

    gate: Tensor
    kind: str

    def __mul__(self, up: Tensor) -> Tensor:
        return gated(self.gate, up, activation=self.kind)
