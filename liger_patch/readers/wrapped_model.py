"""The Transformers model that a user gives, or that one of PEFT's wrappers holds."""

from __future__ import annotations

import sys

from torch import nn
from transformers import PreTrainedModel


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Return the model that is patched: what a PEFT wrapper wraps, or the model itself.

    Raises:
        TypeError: not a Transformers model.
    """
    base = model
    if "peft" in sys.modules:
        from liger_patch.readers.lora_adapters import base_model

        base = base_model(model)
    if not isinstance(base, PreTrainedModel):
        around = "" if base is model else f" around a {type(base).__name__}"
        got = repr(model) if isinstance(model, str) else type(model).__name__
        advice = "load it first, with from_pretrained()"
        if isinstance(getattr(model, "model", None), nn.Module):
            advice = "give its .model"
        if isinstance(base, nn.Module):
            advice = "give the model within, and patch it before it is wrapped or compiled"
        raise TypeError(
            "model must be a transformers.PreTrainedModel or a peft.PeftModel around one, got "
            f"{got}{around}: {advice}"
        )
    return base
