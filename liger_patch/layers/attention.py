"""Derive the classes of attentions on kernels, each from its own class.

An attention's own code runs, with other functions under two kinds of names: the rotary functions
(``rotations``), and the table of attention functions (``masked_attention``).
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Collection, Hashable
from typing import Any

from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from liger_patch.kernels.graphs import is_compiled_here
from liger_patch.layers.checks import is_left_to_model, layers_of
from liger_patch.layers.lora import computed_together
from liger_patch.layers.masked_attention import (
    TABLE,
    attention,
    attention_with_sinks,
    is_causal_by_table,
    own_attention_with_sinks,
)
from liger_patch.layers.other_globals import OtherTable, decorated_again, with_other_globals
from liger_patch.layers.rotations import rotates_or_falls_back, rotations_of
from liger_patch.subclass import derived_class, is_transformers, once_for_each_class

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
