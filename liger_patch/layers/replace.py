"""Put the layers of one model on kernels, and take them back.

Only the classes of these instances change:

- A norm's forward becomes one call of a kernel.
- So does a feed-forward layer's, where its projections are plain.
- An attention runs its own code. Only the functions of its rotary embedding and of its attention
  are others.
- So does the backbone around it. Only the functions that make masks are others.
- So does a recurrent layer, on each sequence of a packed row by itself. Of a gated delta net, the
  functions of the rule and of the convolution are others.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Hashable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from liger_patch.layers import attention, recurrent
from liger_patch.layers.attention import (
    attention_class,
    attention_configuration,
    attention_on_kernels,
)
from liger_patch.layers.checks import EVERYWHERE, LAYER_NAMES, layers_of
from liger_patch.layers.delta_net import delta_net_configuration
from liger_patch.layers.experts import (
    experts_class,
    experts_configuration,
    is_wrapper,
    keeps_class,
)
from liger_patch.layers.lora import is_lora_linear, lora_class
from liger_patch.layers.masks import DEFERS_MASKS, mask_deferring_class
from liger_patch.layers.mlp import mlp_class, mlp_configuration
from liger_patch.layers.norm import norm_class, norm_configuration
from liger_patch.layers.recurrent import (
    carries_state,
    recurrent_class,
    recurrent_on_kernels,
)
from liger_patch.subclass import is_transformers, original_class, overrides_methods

NORM, MLP, LORA = ("rms_norm",), ("gated",), ("lora",)  # the layers that one module may be
EXPERTS, RECURRENT, DELTA_NET = ("experts",), ("recurrent",), recurrent.NAMES
ATTENTION = attention.NAMES
LAYERS = *NORM, *ATTENTION, *MLP, *EXPERTS, *DELTA_NET, *LORA
CLASSES: dict[tuple[str, ...], Callable[[Any, Collection[str]], Any]] = {
    NORM: lambda module, _: norm_class(module),
    ATTENTION: attention_class,
    MLP: lambda module, _: mlp_class(module),
    EXPERTS: lambda module, _: experts_class(module),
    RECURRENT: recurrent_class,
    DELTA_NET: recurrent_class,
    LORA: lambda module, _: lora_class(module),
}
# Instances for which these are equal get the same class: a probe runs once for all of them.
CONFIGURATIONS: dict[tuple[str, ...], Callable[[Any], Hashable]] = {
    NORM: norm_configuration,
    ATTENTION: attention_configuration,
    MLP: mlp_configuration,
    EXPERTS: experts_configuration,
    RECURRENT: delta_net_configuration,
    DELTA_NET: delta_net_configuration,
    LORA: type,
}
ENDINGS = {  # of the classes' names
    "CenteredRMSNorm": NORM,
    "L2Norm": NORM,
    "Experts": EXPERTS,
    "LayerNorm": NORM,
    "RMSNorm": NORM,
    "RMSNormGated": NORM,
    "UnweightedRMSNorm": NORM,
    "WeightlessRMSNorm": NORM,
    "Attention": ATTENTION,
    "MLA": ATTENTION,
    "SelfAttention": ATTENTION,
    "DenseGatedActDense": MLP,
    "MLP": MLP,
    "Mlp": MLP,
    "SdpaAttention": (),  # of RecurrentGemma in Transformers 5.0: its cache is its own
}


def replace_layers(
    model: PreTrainedModel, names: frozenset[str], *, everywhere: bool = False
) -> None:
    """Put the layers of these names on kernels.

    Args:
        everywhere: whether also in calls on devices without kernels, where PyTorch's operations
            compute the same. Such calls run the model's own code otherwise.

    All of Transformers' own classes whose names end as ENDINGS says are looked at, and the probes
    decide. All other layers stay as they are. So do layers whose forward a hook of accelerate
    holds, whether they are on kernels or not.

    Raises:
        RuntimeError: a layer was given another class since the last patch. Then none has changed.
    """
    _check_classes(model)
    head = model.get_output_embeddings()  # whose adapter is part of the loss
    # Only for this call: before the next one, somebody may replace the forward of a class.
    replacements: dict[Hashable, Any] = {}
    for module in list(model.modules()):
        layers = _layers(module)
        if not layers and module is not head and is_lora_linear(module):
            layers = LORA
        if is_wrapper(module):
            layers = EXPERTS
        wanted = tuple(name for name in layers if name in names)
        if not wanted or "forward" in vars(module):
            continue
        if keeps_class(module):
            continue
        # decide anew: somebody may have replaced its class's forward
        original = _class_off_kernels(module)
        _change_class(module, original)
        vars(module).pop(EVERYWHERE, None)
        if layers != LORA and not is_wrapper(module) and overrides_methods(original):
            continue
        key = wanted, CONFIGURATIONS[layers](module)
        if key not in replacements:
            replacements[key] = CLASSES[layers](module, wanted)
        _put_on(module, replacements[key], everywhere)
    if "attention" in names:
        _defer_masks(model, everywhere)


def replace_new_adapters(
    model: PreTrainedModel, names: frozenset[str], *, everywhere: bool
) -> None:
    """Put the layers of these names on kernels that PEFT has added since the model was patched."""
    head = model.get_output_embeddings()
    for module in list(model.modules()):
        if layers_of(module) or module is head or "forward" in vars(module):
            continue
        if "lora" in names and is_lora_linear(module):
            _put_on(module, lora_class(module), everywhere)
        elif "experts" in names and is_wrapper(module):
            _put_on(module, experts_class(module), everywhere)


def _put_on(module: nn.Module, cls: Any, everywhere: bool) -> None:
    if cls is not None:
        module.__class__ = cls
        if everywhere:
            setattr(module, EVERYWHERE, True)


def _defer_masks(model: nn.Module, everywhere: bool) -> None:
    for module in model.modules():
        if module is model or "forward" in vars(module) or layers_of(module):
            continue
        _change_class(module, _class_off_kernels(module))  # anew, as a layer's
        vars(module).pop(EVERYWHERE, None)
        _put_on(module, mask_deferring_class(module), everywhere)


def _layers(module: nn.Module) -> tuple[str, ...]:
    """Return the layers that a module may be, by its class's code, or its name."""
    if carries_state(module):
        return DELTA_NET if type(module).__name__.endswith("GatedDeltaNet") else RECURRENT
    endings = [ending for ending in ENDINGS if type(module).__name__.endswith(ending)]
    return ENDINGS[max(endings, key=len)] if endings else ()


def candidates(model: nn.Module) -> set[str]:
    """Return the layers that modules of the model may be, by the names of their classes, where
    nobody has given them another forward.
    """
    return {
        name
        for module in model.modules()
        if is_transformers(_class_off_kernels(module).forward) and "forward" not in vars(module)
        for name in _layers(module)
    }


def restore_layers(model: nn.Module, names: frozenset[str] = frozenset(LAYERS)) -> None:
    """Take the layers of these names from kernels.

    Raises:
        RuntimeError: a layer was given another class since the patch. Then none has changed.
    """
    _check_classes(model)
    for module in list(model.modules()):
        if keeps_class(module):
            continue
        left = tuple(name for name in layers_of(module) if name not in names)
        if left != layers_of(module):
            original = _class_off_kernels(module)
            derive = recurrent_on_kernels if {*left} <= {*DELTA_NET} else attention_on_kernels
            _change_class(module, derive(left, original) if left else original)
            if not left:
                vars(module).pop(EVERYWHERE, None)
        elif "attention" in names and hasattr(type(module), DEFERS_MASKS):
            _change_class(module, _class_off_kernels(module))
            vars(module).pop(EVERYWHERE, None)


def _check_classes(model: nn.Module) -> None:
    for module in model.modules():
        if _is_replaced(module) and not {LAYER_NAMES, DEFERS_MASKS} & vars(type(module)).keys():
            raise RuntimeError(
                f"{type(module).__name__} was given another class after apply_patch "
                f"({type(module).__mro__[1]}): undo that before apply_patch or revert_patch"
            )


def _class_off_kernels(module: nn.Module) -> Any:
    """Return a layer's class before it was put on kernels; the own one of a patched model within,
    which stays patched.
    """
    return original_class(module) if _is_replaced(module) else type(module)


def _is_replaced(module: nn.Module) -> bool:
    return bool(layers_of(module)) or hasattr(type(module), DEFERS_MASKS)


def _change_class(module: nn.Module, cls: Any) -> None:
    replaced = type(module).forward
    module.__class__ = cls
    for name in ("forward", "_old_forward"):  # accelerate's hooks hold the bound method
        if getattr(vars(module).get(name), "__func__", None) is replaced:
            setattr(module, name, types.MethodType(cls.forward, module))


def count_layers(model: nn.Module) -> dict[str, int]:
    """Return how many layers of each name are on kernels."""
    counts: dict[str, int] = dict.fromkeys(LAYERS, 0)
    for module in model.modules():
        for name in () if is_wrapper(module) else layers_of(module):
            counts[name] += 1
    return counts
