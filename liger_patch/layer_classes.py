"""The classes of norms and attentions on kernels, each made of a layer's own class.

What the kernels must know of a class stands in tables: NORMS, ROTATIONS and ATTENTIONS.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_patch.instance_class import derived_class
from liger_patch.kernels.rms_norm import rms_norm
from liger_patch.kernels.rotary import rotary
from liger_patch.layer_code import is_transformed, is_transformers, names_of


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
    if norms_groups or not is_transformers(type(module).forward):
        return None
    return norm(type(module))


@functools.cache
def norm(original: Any) -> type[nn.Module]:
    """A norm that is one call."""
    eps, offset, promotes = NORMS.get(original.__name__, LLAMA_NORM)

    def forward(self, x: Tensor) -> Tensor:
        if is_transformed():
            return original.forward(self, x)
        weight, dtype = getattr(self, "weight", None), x.dtype
        if not getattr(self, "with_scale", True):
            weight = None
        if weight is not None and promotes:
            dtype = torch.promote_types(dtype, weight.dtype)
        return rms_norm(x, weight, getattr(self, eps), offset=offset, dtype=dtype)

    return derived_class(original, norm, forward=forward, _liger_patch_layer="rms_norm")


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
    names = names_of(type(module)) & ROTATIONS.keys()
    if not names or not is_transformers(type(module).forward):
        return None
    own = type(module).forward.__globals__
    return rotary_attention(type(module)) if all(is_transformers(own[n]) for n in names) else None


@functools.cache
def rotary_attention(original: Any) -> type[nn.Module]:
    """An attention whose forward calls another function by the name of its rotary embedding."""
    (name,) = names_of(original) & ROTATIONS.keys()
    own = original.forward.__globals__[name]
    turn = ATTENTIONS.get(original.__name__, ROTATIONS[name])

    def turned(*arguments: Any, **options: Any) -> Any:
        function = own if is_transformed() else turn
        return function(*arguments, **options)

    forward = _with_global(original.forward, name, turned)
    return derived_class(original, rotary_attention, forward=forward, _liger_patch_layer="rotary")


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
