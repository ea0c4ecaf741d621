"""PEFT's adapters of a patched model: those that come later, and those that stay PEFT's own."""

from __future__ import annotations

import warnings

import torch
from transformers import PreTrainedModel

from liger_patch.layers.lora import OfDtypes, not_plain, replace_new_adapters
from liger_patch.patch.settings import PatchRecord


def follow_adapters(model: PreTrainedModel, record: PatchRecord) -> None:
    """Put the layers of adapters that came after ``apply_patch`` on kernels."""
    configurations = vars(model).get("peft_config")
    if not record.wants_lora or not isinstance(configurations, dict):
        return
    holder, known = record.adapters or (None, {})
    if (
        holder is not configurations  # each injection has its own, also of the same configuration
        or known.keys() != configurations.keys()
        or any(known[name] is not each for name, each in configurations.items())
    ):
        record.adapters = configurations, dict(configurations)
        record.checked_adapters = False
        replace_new_adapters(model)


def warn_of_dtypes(model: PreTrainedModel, record: PatchRecord) -> None:
    """Say once, in training, which LoRA layers run PEFT's own forward for their dtypes' sake."""
    if record.adapters is None or record.checked_adapters:
        return
    if not (model.training and torch.is_grad_enabled()):
        return
    record.checked_adapters = True
    for reason, number in not_plain(model).items():
        if isinstance(reason, OfDtypes):
            warnings.warn(
                f"liger_patch: {number} LoRA layers run PEFT's own forward: {reason}. "
                "QLoRA needs bnb_4bit_compute_dtype=torch.bfloat16, and mixed dtypes need "
                "TrainingArguments(bf16=True)",
                stacklevel=3,
            )
