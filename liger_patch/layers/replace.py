"""Put the layers of one model on kernels, and take them back: norms, rotary embeddings, gates.

Only the classes of these instances change:

- A norm's forward becomes one call of a kernel.
- So does a feed-forward layer's, where its projections are plain.
- An attention runs its own code. Only the function of its rotary embedding,
  ``apply_rotary_pos_emb``, is another.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from liger_patch.layers.attention import attention_class
from liger_patch.layers.lora import is_lora_linear, lora_class
from liger_patch.layers.mlp import mlp_class, mlp_configuration
from liger_patch.layers.norm import norm_class, norm_configuration
from liger_patch.registry import Architecture
from liger_patch.subclass import ORIGINAL

CLASSES = {
    "rms_norm": norm_class,
    "rotary": attention_class,
    "gated": mlp_class,
    "lora": lora_class,
}
LAYERS = tuple(CLASSES)
# Instances for which these are equal get the same class: a probe runs once for all of them.
CONFIGURATIONS: dict[str, Callable[[Any], Hashable]] = {
    "rms_norm": norm_configuration,
    "rotary": type,
    "gated": mlp_configuration,
    "lora": type,
}
LAYER_NAME = "_liger_patch_layer"  # attribute of the classes that are made here
ENDINGS = {  # of the classes' names, after what the registry says
    "CenteredRMSNorm": "rms_norm",
    "L2Norm": "rms_norm",
    "LayerNorm": "rms_norm",
    "RMSNorm": "rms_norm",
    "RMSNormGated": "rms_norm",
    "UnweightedRMSNorm": "rms_norm",
    "WeightlessRMSNorm": "rms_norm",
    "Attention": "rotary",
    "MLA": "rotary",
    "SelfAttention": "rotary",
    "DenseGatedActDense": "gated",
    "MLP": "gated",
    "Mlp": "gated",
}


def replace_layers(model: PreTrainedModel, row: Architecture | None, names: frozenset[str]) -> None:
    """Put the layers of these names, where the row has them, on kernels.

    Without a row, all of Transformers' own classes whose names end as ENDINGS says are looked at.
    The probes decide, as they do for those of a row. All other layers stay as they are. So do
    layers whose forward a hook of accelerate holds, whether they are on kernels or not.

    Raises:
        RuntimeError: a layer was given another class since the last patch. Then none has changed.
    """
    _check_classes(model)
    prefixes = None if row is None else row.layers.split()
    head = model.get_output_embeddings()  # whose adapter is part of the loss
    # Only for this call: before the next one, somebody may replace the forward of a class.
    replacements: dict[Hashable, Any] = {}
    for module in list(model.modules()):
        layer = _layer(type(module).__name__, prefixes)
        if layer is None and module is not head and is_lora_linear(module):
            layer = "lora"
        if layer not in names or "forward" in vars(module):
            continue
        _restore(module)  # decide anew: somebody may have replaced its class's forward
        key = layer, CONFIGURATIONS[layer](module)
        if key not in replacements:
            replacements[key] = CLASSES[layer](module)
        if replacements[key] is not None:
            module.__class__ = replacements[key]


def _layer(class_name: str, prefixes: list[str] | None) -> str | None:
    if prefixes is None:
        endings = [ending for ending in ENDINGS if class_name.endswith(ending)]
        return ENDINGS[max(endings, key=len)] if endings else None
    for prefix in prefixes:
        if class_name.startswith(prefix):
            ending = class_name.removeprefix(prefix).removeprefix("Text")
            if ending in ENDINGS:
                return ENDINGS[ending]
    return None


def restore_layers(model: nn.Module, names: frozenset[str] = frozenset(LAYERS)) -> None:
    """Give every layer of these names its own class back.

    Raises:
        RuntimeError: a layer was given another class since the patch. Then none has changed.
    """
    _check_classes(model)
    for module in list(model.modules()):
        if getattr(type(module), LAYER_NAME, None) in names:
            _restore(module)


def _check_classes(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(type(module), LAYER_NAME) and LAYER_NAME not in vars(type(module)):
            raise RuntimeError(
                f"{type(module).__name__} was given another class after apply_patch "
                f"({type(module).__mro__[1]}): undo that before apply_patch or revert_patch"
            )


def _restore(module: nn.Module) -> None:
    if not hasattr(type(module), LAYER_NAME):
        return
    replaced, original = type(module).forward, getattr(type(module), ORIGINAL)
    module.__class__ = original
    for name in ("forward", "_old_forward"):  # accelerate's hooks hold the bound method
        if getattr(vars(module).get(name), "__func__", None) is replaced:
            setattr(module, name, types.MethodType(original.forward, module))


def count_layers(model: nn.Module) -> dict[str, int]:
    """Return how many layers of each name are on kernels."""
    counts: dict[str, int] = dict.fromkeys(LAYERS, 0)
    for module in model.modules():
        name = getattr(type(module), LAYER_NAME, None)
        if name is not None:
            counts[name] += 1
    return counts
