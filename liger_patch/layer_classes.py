"""The classes of layers on kernels, each made of a layer's own class.

What the kernels must know of a class stands in tables: NORMS, GATES, ROTATIONS and ATTENTIONS.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from transformers.activations import ACT2FN

from liger_patch.instance_class import derived_class
from liger_patch.kernels.gated import gated
from liger_patch.kernels.gated_mlp import gated_mlp
from liger_patch.kernels.rms_norm import rms_norm
from liger_patch.kernels.rotary import rotary


class Norm(NamedTuple):
    """How a class computes its norm. One without a weight (or ``with_scale``) scales nothing."""

    eps: str = "variance_epsilon"  # the attribute
    offset: float = 0.0  # added to the weight
    promotes: bool = False  # the weight's dtype takes part in the result's


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
    """The class of a norm on a kernel; None where it norms groups of features, or is not
    Transformers'.
    """
    norms_groups = getattr(module, "group_size", None) is not None
    if norms_groups or not _is_transformers(type(module).forward):
        return None
    return norm(type(module))


@functools.cache
def norm(original: Any) -> type[nn.Module]:
    """A norm that is one call."""
    eps, offset, promotes = NORMS.get(original.__name__, LLAMA_NORM)

    def forward(self, x: Tensor) -> Tensor:
        if _is_transformed():
            return original.forward(self, x)
        weight, dtype = getattr(self, "weight", None), x.dtype
        if not getattr(self, "with_scale", True):
            weight = None
        if weight is not None and promotes:
            dtype = torch.promote_types(dtype, weight.dtype)
        return rms_norm(x, weight, getattr(self, eps), offset=offset, dtype=dtype)

    return derived_class(original, norm, forward=forward, _liger_patch_layer="rms_norm")


# what the classes of activations compute
ACTIVATIONS = {type(ACT2FN["silu"]): "silu", type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh"}


class Gate(NamedTuple):
    """How a class computes ``down_proj(act(gate) * up)``."""

    products: Callable[[Any, Tensor], tuple[Tensor, Tensor | None]]  # of x: gate and up
    activation: str = "act_fn"  # the attribute
    projections: str = "gate_proj up_proj"  # whose products gate and up are; "" if they are not


def _two_products(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return self.gate_proj(x), self.up_proj(x)


def _one_product(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Phi-3's and GLM-4's: gate and up are halves of it."""
    return self.gate_up_proj(x), None


def _sparse_gate(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gemma 3n's: some layers keep the largest gates."""
    gate = self.gate_proj(x)
    if self.activation_sparsity > 0.0:
        gate = self._gaussian_topk(gate)
    return gate, self.up_proj(x)


GATES = {  # by the names in the code of forward
    frozenset(names.split()): gate
    for names, gate in {
        "act_fn down_proj gate_proj up_proj": Gate(_two_products),
        "activation_fn down_proj gate_proj up_proj": Gate(_two_products, "activation_fn"),
        "activation_fn chunk down_proj gate_up_proj": Gate(
            _one_product, "activation_fn", "gate_up_proj"
        ),
        "_gaussian_topk act_fn activation_sparsity down_proj gate_proj up_proj": Gate(
            _sparse_gate, projections=""
        ),
    }.items()
}


def mlp_class(module: Any) -> Any:
    """The class of a feed-forward layer whose gate is on a kernel; None where it has another form,
    or an activation that has no kernel, or is not Transformers'.
    """
    gate = GATES.get(_names(type(module)))
    if gate is None or not _is_transformers(type(module).forward):
        return None
    if type(getattr(module, gate.activation, None)) not in ACTIVATIONS:
        return None
    return gated_layer(type(module))


@functools.cache
def gated_layer(original: Any) -> type[nn.Module]:
    """A feed-forward layer that is one call where its projections are plain, else one whose
    activation is computed with the product behind it.
    """
    products, activation, projections = GATES[_names(original)]

    def forward(self, x: Tensor) -> Tensor:
        act = getattr(self, activation)
        kind = ACTIVATIONS.get(type(act))
        if kind is None or _has_hooks(act) or _is_transformed():
            return original.forward(self, x)
        modules = [getattr(self, name) for name in projections.split()]
        if modules and all(_is_plain(module) for module in (*modules, self.down_proj)):
            gate_weight, up_weight = [*(m.weight for m in modules), None][:2]
            weights = (gate_weight, up_weight, self.down_proj.weight)
            return gated_mlp(x, *weights, activation=kind)
        gate, up = products(self, x)
        if up is not None and gate.dtype != up.dtype:  # an adapter of another dtype on one of them
            return self.down_proj(act(gate) * up)
        return self.down_proj(gated(gate, up, activation=kind))

    return derived_class(original, gated_layer, forward=forward, _liger_patch_layer="gated")


def _is_plain(module: nn.Module) -> bool:
    """Whether a call of the module is the product with its weight, and nothing else."""
    return (
        type(module) is nn.Linear
        and module.bias is None
        and type(module.weight) in (nn.Parameter, Tensor)
        and not _has_hooks(module)
    )


def _turned_by_sections(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: list[int]
) -> tuple[Tensor, Tensor]:
    """Qwen 2-VL's, before Transformers 5.17: tables of time, height and width (3, B, T, D)."""
    sections = [size for _ in range(2) for size in mrope_section]
    parts = [table.split(sections, -1) for table in (cos, sin)]
    cos, sin = (torch.cat([each[i % 3] for i, each in enumerate(part)], -1) for part in parts)
    return rotary(q, k, cos, sin)


def _turned_by_complex(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4's: cos + i sin, and tokens in front of heads."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = rotary(q, k, angles.real, angles.imag, interleaved=True, dtype=q.dtype)
    return q.transpose(1, 2), k.transpose(1, 2)


def _turned_in_own_dtype(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """OLMo 2's: the results have the dtype of queries and keys, however wide the tables are."""
    return rotary(q, k, cos, sin, dtype=q.dtype)


def _turned_alone(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """Gemma 3n's and 4's: queries and keys come one by one, heads in this dimension."""
    turned, _ = rotary(x.transpose(1, unsqueeze_dim), None, cos, sin)
    return turned.transpose(1, unsqueeze_dim)


def _turned_beside(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """GLM 4's: the tables' second halves repeat the first."""
    half = cos.shape[-1] // 2
    return rotary(q, k, cos[..., :half], sin[..., :half], interleaved=True)


def _turned_beside_in_own_dtype(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Cohere's: the tables hold each angle twice, side by side."""
    return rotary(q, k, cos[..., ::2], sin[..., ::2], interleaved=True, dtype=q.dtype)


ROTATIONS: dict[str, Callable[..., Any]] = {  # by the names that attentions call
    "apply_multimodal_rotary_pos_emb": _turned_by_sections,
    "apply_rotary_emb": _turned_by_complex,
    "apply_rotary_pos_emb": rotary,
}
ATTENTIONS: dict[str, Callable[..., Any]] = {  # that call another function by one of these names
    "Cohere2Attention": _turned_beside_in_own_dtype,
    "CohereAttention": _turned_beside_in_own_dtype,
    "Gemma3nTextAttention": _turned_alone,
    "Gemma4TextAttention": _turned_alone,
    "Gemma4UnifiedTextAttention": _turned_alone,
    "Glm4Attention": _turned_beside,
    "Olmo2Attention": _turned_in_own_dtype,
    "Olmo3Attention": _turned_in_own_dtype,
}


def attention_class(module: Any) -> Any:
    """The class of an attention whose rotary embedding is on a kernel; None where it has none, or
    one that is not Transformers'.
    """
    names = _names(type(module)) & ROTATIONS.keys()
    if not names or not _is_transformers(type(module).forward):
        return None
    own = type(module).forward.__globals__
    return rotary_attention(type(module)) if all(_is_transformers(own[n]) for n in names) else None


@functools.cache
def rotary_attention(original: Any) -> type[nn.Module]:
    """An attention whose forward calls another function by the name of its rotary embedding."""
    (name,) = _names(original) & ROTATIONS.keys()
    own = original.forward.__globals__[name]
    turn = ATTENTIONS.get(original.__name__, ROTATIONS[name])

    def turned(*arguments: Any, **options: Any) -> Any:
        function = own if _is_transformed() else turn
        return function(*arguments, **options)

    forward = _with_global(original.forward, name, turned)
    return derived_class(original, rotary_attention, forward=forward, _liger_patch_layer="rotary")


def _names(cls: Any) -> frozenset[str]:
    """In the code of its forward, where it has some."""
    code = getattr(cls.forward, "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def _is_transformers(function: Any) -> bool:
    """Whether a function is Transformers' own: nobody has replaced it by another."""
    return getattr(function, "__module__", "").startswith("transformers.")


def _with_global(function: Any, name: str, value: object) -> Any:
    """The same code, which finds this value under the name, and under all others what its module
    had when this was called.
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
    """Whether a call of the module does more than its class's forward."""
    return bool(
        _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )
