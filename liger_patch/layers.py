"""The layers of one model on the kernels of this package: norms, rotary embeddings, gates.

Only the classes of these instances change: norms and feed-forward layers get a forward that is one
call, and an attention's forward is its own code with another function under the name
``apply_rotary_pos_emb``.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

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
# the names in the code of down_proj(act_fn(gate_proj(x)) * up_proj(x))
GATED_NAMES = {"act_fn", "down_proj", "gate_proj", "up_proj"}
# what the classes of act_fn compute
ACTIVATIONS = {type(ACT2FN["silu"]): "silu", type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh"}


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
            known = type(getattr(module, "act_fn", None)) in ACTIVATIONS
            if known and {*type(module).forward.__code__.co_names} == GATED_NAMES:
                module.__class__ = gated_mlp(type(module))


def _layer(class_name: str, prefixes: list[str]) -> str | None:
    for prefix in prefixes:
        ending = class_name.removeprefix(prefix)
        if ending != class_name and ending in ENDINGS:
            return ENDINGS[ending]
    return None


def restore_layers(model: nn.Module) -> None:
    """Give every layer its own class and activation back."""
    for module in list(model.modules()):
        if LAYER_NAME in vars(type(module)):
            module.__class__ = getattr(type(module), ORIGINAL)
        elif hasattr(type(module), LAYER_NAME):
            raise RuntimeError(
                f"{type(module).__name__} was given another class after apply_patch "
                f"({type(module).__mro__[1]}): undo that before revert_patch"
            )


def count_layers(model: nn.Module) -> dict[str, int]:
    """How many layers of each name are on kernels."""
    counts: dict[str, int] = dict.fromkeys(LAYERS, 0)
    for module in model.modules():
        name = getattr(type(module), LAYER_NAME, None)
        if name is not None:
            counts[name] += 1
    return counts


@functools.cache
def llama_norm(original: Any) -> type[nn.Module]:
    """Llama's: the weight's dtype takes part in the result's."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if _is_transformed():
            return original.forward(self, hidden_states)
        dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, dtype=dtype)

    return derived_class(original, llama_norm, forward=forward, _liger_patch_layer="rms_norm")


@functools.cache
def olmo_norm(original: Any) -> type[nn.Module]:
    """OLMo 2's: as Llama's, in the dtype of its argument."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if _is_transformed():
            return original.forward(self, hidden_states)
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)

    return derived_class(original, olmo_norm, forward=forward, _liger_patch_layer="rms_norm")


@functools.cache
def gemma_norm(original: Any) -> type[nn.Module]:
    """Gemma's: 1 is added to the weight."""

    def forward(self, x: Tensor) -> Tensor:
        if _is_transformed():
            return original.forward(self, x)
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
def gated_mlp(original: Any) -> type[nn.Module]:
    """A feed-forward layer whose activation is computed with the product behind it."""

    def forward(self, x: Tensor) -> Tensor:
        kind = ACTIVATIONS.get(type(self.act_fn))
        if kind is None or _has_hooks(self.act_fn) or _is_transformed():
            return original.forward(self, x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if gate.dtype != up.dtype:  # an adapter of another dtype on one of them
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(gated(gate, up, activation=kind))

    return derived_class(original, gated_mlp, forward=forward, _liger_patch_layer="gated")


@functools.cache
def rotary_attention(original: Any) -> type[nn.Module]:
    """An attention whose forward calls ``rotary`` where its code says ``apply_rotary_pos_emb``."""

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if _is_transformed():
            return own(q, k, cos, sin)
        return rotary(q, k, cos, sin)

    own = original.forward.__globals__[ROTARY]
    forward = _with_global(original.forward, ROTARY, turned)
    return derived_class(original, rotary_attention, forward=forward, _liger_patch_layer="rotary")


@functools.cache
def olmo_attention(original: Any) -> type[nn.Module]:
    """OLMo 2's: the results have the dtype of queries and keys, however wide the tables are."""

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if _is_transformed():
            return own(q, k, cos, sin)
        return rotary(q, k, cos, sin, dtype=q.dtype)

    own = original.forward.__globals__[ROTARY]
    forward = _with_global(original.forward, ROTARY, turned)
    return derived_class(original, olmo_attention, forward=forward, _liger_patch_layer="rotary")


ATTENTIONS = {"Olmo2Attention": olmo_attention, "Olmo3Attention": olmo_attention}


def _with_global(function: Any, name: str, value: object) -> Any:
    """The same code, which finds this value under the name, and what its module has now under all
    others.
    """
    names = {**function.__globals__, name: value}
    # Dynamo would look names up in the module of this name instead
    names.pop("__name__", None)
    other = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    other.__kwdefaults__, other.__annotations__ = function.__kwdefaults__, function.__annotations__
    other.__doc__, other.__qualname__ = function.__doc__, function.__qualname__
    return other


def _is_transformed() -> bool:
    """Whether torch.func transforms the call: the kernels have no rules for that."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active()


def _has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )
