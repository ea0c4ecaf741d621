"""Derive the classes of attentions on kernels, each from its own class.

An attention's own code runs, with other functions under two kinds of names: the table of attention
functions (``masked_attention``), and the rotary functions. A probe tries which of ROTATIONS a
rotary function computes, before an attention is replaced; ATTENTIONS has what no probe can see.

B: batch size, T: tokens, D: features of a query or key.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from liger_patch.kernels.graphs import is_compiled_here
from liger_patch.kernels.rotary import rotary
from liger_patch.layers.checks import (
    is_left_to_model,
    layers_of,
    names_of,
    needs_own_code,
    probing,
    results_match,
)
from liger_patch.layers.lora import computed_together
from liger_patch.layers.masked_attention import (
    TABLE,
    attention,
    attention_with_sinks,
    is_causal_by_table,
    own_attention_with_sinks,
)
from liger_patch.layers.other_globals import OtherTable, decorated_again, with_other_globals
from liger_patch.subclass import derived_class, is_transformers, once_for_each_class, own_name

NAMES = "rotary", "attention"  # of the layers that an attention may be


def attention_class(module: Any, names: Collection[str]) -> Any:
    """Return the class that puts an attention on kernels, or None.

    It is None where the attention has none of the layers of these names, and where its code is not
    Transformers' own.

    Args:
        names: some of NAMES.
    """
    original = type(module)
    own = original.forward
    if not is_transformers(own) or decorated_again(own, inspect.unwrap(own)) is None:
        return None
    found = [name for name in NAMES if name in names]
    if "rotary" in found and not rotations_of(original):
        found.remove("rotary")
    if "attention" in found and not is_causal_by_table(module):
        found.remove("attention")
    if not found:
        return None
    replacement: Any = attention_on_kernels(tuple(found), original)
    replacement.forward.look_up()  # once: compiled calls do not look up globals
    return replacement


def attention_configuration(module: nn.Module) -> Hashable:
    """Return the key under which attentions share one class on kernels."""
    return type(module), getattr(module, "is_causal", None)


def with_masks(model: nn.Module) -> Counter[str]:
    """Return how many attentions on kernels keep all their masks, by the reason."""
    found: Counter[str] = Counter()
    for module in model.modules():
        if "attention" in layers_of(module):
            name = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
            has_sinks = name == "eager" and own_attention_with_sinks(type(module)) is not None
            if name != "sdpa" and not has_sinks:
                found[f"attn_implementation={name!r} is not 'sdpa'"] += 1
    return found


@once_for_each_class
def attention_on_kernels(names: tuple[str, ...], original: Any) -> type[nn.Module]:
    """Derive the class of an attention whose forward calls the kernels of these layers."""
    own = inspect.unwrap(original.forward)
    module = own.__globals__
    rotations = rotations_of(original) if "rotary" in names else {}
    values: dict[str, Any] = {
        name: rotates_or_falls_back(module[name], name, rotate)
        for name, rotate in rotations.items()
    }
    if "attention" in names:
        others: dict[Any, Any] = {sdpa_attention_forward: attention}
        sinks = own_attention_with_sinks(original)
        if sinks is not None:
            others[sinks] = attention_with_sinks(sinks)
        values[TABLE] = OtherTable(module[TABLE], others)
    return derived_class(
        original,
        functools.partial(attention_on_kernels, names),
        forward=decorated_again(original.forward, _forward_on_kernels(own, values)),
        _liger_patch_layers=names,
    )


def _forward_on_kernels(function: Any, values: dict[str, Any]) -> Any:
    """Return the forward of an attention on kernels: the same code, with other globals.

    Each call looks up all globals in the function's module again. Around it, the projections of one
    input are computed together.

    Args:
        function: the attention's own forward, without its decorators.
        values: what this package has, by the names of the globals that it replaces.
    """
    other, look_up = with_other_globals(function, values)

    @functools.wraps(function)
    def forward(*arguments: Any, **options: Any) -> Any:
        if is_compiled_here():  # Dynamo guards the globals that it has found
            return other(*arguments, **options)
        layer, *others = arguments
        if is_left_to_model(layer, others[0] if others else options.get("hidden_states")):
            return function(*arguments, **options)
        look_up()
        with computed_together(layer):
            return other(*arguments, **options)

    vars(forward)["look_up"] = look_up
    return forward


def _rotate_by_complex(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate x (B, T, num_heads, D) by angles cos + i sin (Llama 4)."""
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = rotary(q, k, angles.real, angles.imag, interleaved=True, dtype=q.dtype)
    return q.transpose(1, 2), k.transpose(1, 2)


def _rotate_heads_by_complex(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate x (B, num_heads, T, D) by angles cos + i sin (DeepSeek V2)."""
    return rotary(q, k, angles.real, angles.imag, interleaved=True, dtype=q.dtype)


def _rotate_patches(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate x (T, num_heads, D), the patches of all images (Qwen2-VL), or
    x (B, T, num_heads, D) (Kimi K2.5), by tables (T, D).
    """
    is_batch = q.dim() == 4
    if not is_batch:
        q, k = q[None], k[None]
    q, k = rotary(q.transpose(1, 2), k.transpose(1, 2), cos[None], sin[None], dtype=q.dtype)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return (q, k) if is_batch else (q[0], k[0])


def _rotate_pairs_to_halves(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Rotate features in pairs; the results hold halves (DeepSeek V3)."""
    half = cos.shape[-1] // 2
    rotated = rotary(q, k, cos[..., :half], sin[..., :half], interleaved=True, grouped=True)
    return rotated[0], None if k is None else rotated[1]


def _rotate_in_own_dtype(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate by tables of any dtype; results have the dtype of q and k (OLMo 2)."""
    return rotary(q, k, cos, sin, dtype=q.dtype)


def _rotate_one(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """Rotate q or k alone; dimension ``unsqueeze_dim`` has size num_heads (Gemma 3n and 4)."""
    rotated, _ = rotary(x.transpose(1, unsqueeze_dim), None, cos, sin)
    return rotated.transpose(1, unsqueeze_dim)


def _rotate_pairs(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, beside: bool = False, own_dtype: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate features in pairs. Tables hold each angle twice, in their second half or side by side.
    Results have the dtype of q * cos, or of q.
    """
    half = cos.shape[-1] // 2
    cos, sin = (each[..., ::2] if beside else each[..., :half] for each in (cos, sin))
    return rotary(q, k, cos, sin, interleaved=True, dtype=q.dtype if own_dtype else None)


_rotate_pairs_in_own_dtype = functools.partial(_rotate_pairs, own_dtype=True)  # ERNIE 4.5
_rotate_neighbours = functools.partial(_rotate_pairs, beside=True, own_dtype=True)  # Cohere
_rotate_neighbours_in_promoted_dtype = functools.partial(_rotate_pairs, beside=True)  # GLM-4.1V


def _rotate_by_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate by tables (B, T, D / 2), which hold each angle once (gpt-oss)."""
    return rotary(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))


def _rotate_backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate by the negative angles (nanochat)."""
    return rotary(q, k, cos, -sin)


# by the name of the function that an attention calls: a probe tries which of them it computes
ROTATIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "apply_rotary_emb": (_rotate_by_complex, _rotate_heads_by_complex),
    "apply_rotary_pos_emb": (
        rotary,
        _rotate_in_own_dtype,
        _rotate_one,
        _rotate_pairs,
        _rotate_pairs_in_own_dtype,
        _rotate_by_halves,
        _rotate_backwards,
    ),
    "apply_rotary_pos_emb_interleave": (_rotate_pairs_to_halves,),
    "apply_rotary_pos_emb_vision": (_rotate_patches,),
}
# attentions whose tables hold each angle side by side: no probe of their function can see that
ATTENTIONS: dict[str, Callable[..., Any]] = {
    "Cohere2Attention": _rotate_neighbours,
    "Cohere2MoeAttention": _rotate_neighbours,
    "CohereAttention": _rotate_neighbours,
    "Glm4vTextAttention": _rotate_neighbours_in_promoted_dtype,
    "GlmOcrTextAttention": _rotate_neighbours_in_promoted_dtype,
}
PROBED = 8  # features of a probe's query and key


def rotations_of(cls: Any) -> dict[str, Callable[..., Any]]:
    """Return the rotation that replaces each rotary function that an attention's forward names:
    one, or two between which its configuration chooses (DeepSeek V3). Empty where one of them is
    not Transformers' own, or computes something else than ROTATIONS and ATTENTIONS say.
    """
    rotations: dict[str, Callable[..., Any]] = {}
    for name in sorted(names_of(cls) & ROTATIONS.keys()):
        known = (ATTENTIONS[own_name(cls)],) if own_name(cls) in ATTENTIONS else ROTATIONS[name]
        own = inspect.unwrap(cls.forward).__globals__.get(name)
        if own is None or not is_transformers(own):
            return {}
        rotate = next((each for each in known if _agree(own, name, each)), None)
        if rotate is None:
            return {}
        rotations[name] = rotate
    return rotations


def _agree(own: Callable[..., Any], name: str, rotate: Callable[..., Any]) -> bool:
    """Return whether both rotate the same way, by every form of tables that ``own`` can take."""

    def results(function: Callable[..., Any], arguments: tuple) -> list[Tensor]:
        rotated = function(*arguments)
        return [rotated] if isinstance(rotated, Tensor) else list(rotated)

    compared = False
    with probing():
        for arguments in _trials(name, rotate):
            try:
                expected = results(own, arguments)
            except Exception:  # this function does not take such tables
                continue
            if not results_match(lambda e=expected: e, lambda a=arguments: results(rotate, a)):
                return False
            compared = True
    return compared


def _trials(name: str, rotate: Callable[..., Any]) -> Iterator[tuple]:
    """Yield arguments for a function of this name: queries and keys in two dtypes, tables that are
    as wide as these, or half as wide, for features that are rotated in part.
    """
    tokens, angles = 3, torch.arange(3 * PROBED, dtype=torch.float32).view(1, 3, PROBED)
    for dtype in (torch.float32, torch.bfloat16):
        q = (0.7 * torch.arange(4.0 * tokens * PROBED)).cos().view(1, 4, tokens, PROBED).to(dtype)
        k = q[:, 1:3].flip(1)
        if name == "apply_rotary_emb":
            half = angles[..., : PROBED // 2]
            if rotate is _rotate_by_complex:
                q, k = q.transpose(1, 2), k.transpose(1, 2)
            yield q, k, torch.polar(torch.ones_like(half), half)
            continue
        if name == "apply_rotary_pos_emb_vision":
            q, k, table = q.transpose(1, 2), k.transpose(1, 2), angles[0]
            yield q[0], k[0], table.cos(), table.sin()
            yield q, k, table.cos(), table.sin()
            continue
        for width in (PROBED, PROBED // 2):
            table = angles[..., :width]
            # the only tables that the models of these rotations have
            if rotate in (_rotate_neighbours, _rotate_neighbours_in_promoted_dtype):
                table = table[..., ::2].repeat_interleave(2, -1)
            elif rotate is _rotate_pairs_to_halves:
                table = torch.cat((angles[..., : PROBED // 2],) * 2, -1)
            if rotate is _rotate_one:
                yield q, table.cos(), table.sin()
            else:
                yield q, k, table.cos(), table.sin()


def rotates_or_falls_back(
    own: Callable[..., Any], name: str, rotate: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that calls ``rotate`` if the kernel serves the arguments, else ``own``."""
    with probing():
        trials = list(_trials(name, rotate))  # what ``rotate`` takes
    takes_options = rotate is _rotate_one
    first = 1 if takes_options else 2  # the arguments before the tables
    number, dims = len(trials[0]), {(each[0].dim(), each[first].dim()) for each in trials}

    def rotated(*arguments: Any, **options: Any) -> Any:
        if len(arguments) != number or (options and not takes_options):
            return own(*arguments, **options)
        table = arguments[first]
        is_known = (arguments[0].dim(), table.dim()) in dims
        # Zaya multiplies k by a weight in float32, under autocast too
        is_known = is_known and arguments[0].dtype == arguments[first - 1].dtype
        # no gradient is computed for tables: MLCD trains an angle
        is_trained = table.requires_grad or arguments[-1].requires_grad
        if not is_known or is_trained or needs_own_code(*arguments):
            return own(*arguments, **options)
        return rotate(*arguments, **options)

    return rotated
