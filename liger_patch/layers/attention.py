"""The classes of attentions whose rotary embedding is on a kernel, each made of an attention's own.

What the kernel must know of a class stands in two tables: ROTATIONS and ATTENTIONS.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_patch.kernels.rotary import rotary
from liger_patch.layers.checks import is_transformers, names_of, needs_own_code
from liger_patch.subclass import derived_class, once_for_each_class


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
    if not all(is_transformers(own[n]) for n in names):
        return None
    replacement: Any = rotary_attention(type(module))
    replacement.forward.look_up()  # for torch.compile: its calls do not
    return replacement


@once_for_each_class
def rotary_attention(original: Any) -> type[nn.Module]:
    """An attention whose forward calls another function by the name of its rotary embedding."""
    (name,) = names_of(original) & ROTATIONS.keys()
    own = original.forward.__globals__[name]
    turn = ATTENTIONS.get(original.__name__, ROTATIONS[name])

    def turned(*arguments: Any, **options: Any) -> Any:
        function = own if needs_own_code(*arguments) else turn
        return function(*arguments, **options)

    forward = _with_global(original.forward, name, turned)
    return derived_class(original, rotary_attention, forward=forward, _liger_patch_layer="rotary")


def _with_global(function: Any, name: str, value: object) -> Any:
    """The same code, which finds this value under the name, and under all others what its module
    has when it is called.
    """
    module = function.__globals__
    own = module[name]
    found = {**module, name: value}
    # Dynamo would look names up in the module of this name instead
    found.pop("__name__", None)
    other = types.FunctionType(
        function.__code__, found, function.__name__, function.__defaults__, function.__closure__
    )
    other.__kwdefaults__ = function.__kwdefaults__
    others = [each for each in _names_in(function.__code__) if each in module and each != name]

    def look_up() -> None:
        found[name] = value if module.get(name) is own else module.get(name)  # replaced since
        for each in others:
            if each in module:
                found[each] = module[each]

    @functools.wraps(function)
    def forward(*arguments: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():  # which guards what it has found
            look_up()
        return other(*arguments, **options)

    vars(forward)["look_up"] = look_up
    return forward


def _names_in(code: types.CodeType) -> set[str]:
    """In the code of a function, and of those within it."""
    within = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*(_names_in(each) for each in within))
