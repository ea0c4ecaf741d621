"""PEFT's adapters of a patched model: those that come later, and those that stay PEFT's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from liger_patch.layers.experts import replace_new_wrappers
from liger_patch.layers.lora import OfDtypes, forget_calls, not_plain, replace_new_adapters
from liger_patch.patch.settings import PatchRecord

DISABLED = "adapters are disabled"  # the reason that ``readers.lora_adapters`` gives


def follow_adapters(model: PreTrainedModel, record: PatchRecord) -> None:
    """Put the layers of adapters that came after ``apply_patch`` on kernels."""
    configurations = vars(model).get("peft_config")
    if not isinstance(configurations, dict):
        return
    holder, known = record.adapters or (None, {})
    if (
        holder is not configurations  # each injection has its own, also of the same configuration
        or known.keys() != configurations.keys()
        or any(known[name] is not each for name, each in configurations.items())
    ):
        record.adapters = configurations, dict(configurations)
        record.checked_dtypes = False
        everywhere = record.layers is not True
        if record.wants("lora"):
            replace_new_adapters(model, everywhere=everywhere)
        if record.wants("experts"):
            replace_new_wrappers(model, everywhere=everywhere)


@contextmanager
def warning_of_dtypes(model: PreTrainedModel, record: PatchRecord) -> Iterator[None]:
    """Warn after the first forward pass in training, if layers of the model's adapters ran PEFT's
    own forward because of a dtype that a setting would mend. Entered by an ``ExitStack``.
    """
    if not (model.training and torch.is_grad_enabled()):
        yield
        return
    forget_calls(model)
    yield
    reasons = not_plain(model)
    # disabled adapters: the pass of a reference model, which says nothing of training
    record.checked_dtypes = DISABLED not in reasons
    for reason, number in reasons.items():
        if isinstance(reason, OfDtypes):
            warnings.warn(
                f"liger_patch: PEFT's own forward runs {number} of the LoRA layers: {reason}. "
                f"{reason.advice}",
                stacklevel=6,
            )
