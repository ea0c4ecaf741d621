"""Follow what changes in the layers of a patched model later: replaced forwards of their classes,
and new adapters of PEFT. Warn of adapters that run PEFT's own forward.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from liger_patch.layers.lora import OfDtypes, forget_calls, not_plain
from liger_patch.layers.replace import (
    LAYERS,
    count_layers,
    replace_layers,
    replace_new_adapters,
)
from liger_patch.patch.settings import PatchRecord
from liger_patch.subclass import count_replacements

DISABLED = "adapters are disabled"  # the reason that ``readers.lora_adapters`` gives


def follow_classes(model: PreTrainedModel, record: PatchRecord) -> None:
    """Choose the layers on kernels again if somebody has replaced the forward of a class since, or
    taken that back.
    """
    replacements = count_replacements()
    if record.replacements == replacements:
        return
    record.replacements = replacements
    if record.layers is not False:
        names = frozenset(LAYERS) if record.layers is True else record.layers
        replace_layers(model, names, everywhere=record.layers is not True)
        record.unpacks = count_layers(model)["recurrent"]


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
        names = frozenset(name for name in ("lora", "experts") if record.wants(name))
        replace_new_adapters(model, names, everywhere=record.layers is not True)


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
