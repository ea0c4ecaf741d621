"""Tell which tokens' results a call with labels uses. Those of padding need not be eager's then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from liger_patch.patch.settings import PatchRecord

OUTPUT_FLAGS = ("output_router_logits", "output_hidden_states", "output_attentions")
# the layers whose tokens only see what their mask shows, by Transformers' names
ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


def used_tokens(
    model: PreTrainedModel,
    record: PatchRecord,
    targets: Tensor,  # (B, T)
    ignore_index: int,
    named: Mapping[str, Any],
) -> Tensor | None:
    """Return (B, T) bool, True for the tokens whose results a call uses: those that predict a
    label. None for all of them, where a router's loss or the caller may use others; where the mask
    is the caller's own, who may give it to other calls; on several devices, to each of which the
    mask is copied; and in architectures that are not tested.

    Layers that are not attention see earlier tokens that the mask does not show, as state-space
    layers do: there, all tokens up to the last that predicts a label are used.

    Args:
        targets: (B, T) the label that each token predicts.
        named: the arguments of the call, by their names.
    """
    config = model.config.get_text_config()
    uses_others = getattr(config, "z_loss_coefficient", 0.0) or any(
        getattr(config, name, False) if named.get(name) is None else named[name]
        for name in OUTPUT_FLAGS
    )
    mask = named.get("attention_mask")
    has_own_mask = mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2)
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if uses_others or has_own_mask or len(devices) > 1 or not record.tested:
        return None
    used = targets != ignore_index
    return used.flip(-1).cummax(-1).values.flip(-1) if has_other_layers(model) else used


def has_other_layers(model: PreTrainedModel) -> bool:
    """Return whether a model has layers that are not attention, whose tokens see earlier ones that
    the mask does not show.
    """
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return model._is_stateful or bool({*layer_types} - ATTENTION_LAYER_TYPES)
