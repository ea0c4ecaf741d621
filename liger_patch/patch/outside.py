"""Notice losses of a patched model that its own call does not compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_patch.patch import flags
from liger_patch.patch.fallback import why_transformed
from liger_patch.patch.settings import LOGITS_ASKED, PatchRecord

LOSS_OUTSIDE = "the model was called without labels, and its logits were used in a loss. "
IN_TRAINER = (
    "Give it labels; in Trainer, use apply_patch(label_smoothing=...) instead of "
    "label_smoothing_factor; for TRL's trainers see liger_patch.integrations.trl"
)
IN_TRL = "TRL has no fused loss with label_smoothing_factor or compute_loss_func"
TRLS_HEAD = (
    "TRL has replaced the forward of a model that was patched before. Use the trainer of "
    "liger_patch.integrations with use_liger_patch=True, or give TRL's an unpatched model and call "
    "apply_trl_patch(trainer.model)"
)


def note_loss_outside(record: PatchRecord, outputs: Any) -> None:
    """Have the backward pass through a call's real logits note that no loss was fused. Not in a
    graph of torch.compile, which takes no such hook.
    """
    logits = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor) or not logits.requires_grad:
        return
    if torch.compiler.is_compiling() or why_transformed() is not None:
        return
    asked = flags.return_logits() is True

    def note(_: Tensor) -> None:
        if asked:
            record.note(LOGITS_ASKED)
        elif record.fused_head_call is None:
            record.note(LOSS_OUTSIDE + IN_TRAINER)
        elif record.fused:  # else TRL was told why
            record.note(LOSS_OUTSIDE + IN_TRL)

    logits.register_hook(note)


def note_other_forward(record: PatchRecord, forward: object) -> None:
    """Note that a trainer of TRL gives the model a forward with a head of its own, which does not
    call the patched one.
    """
    function = getattr(forward, "__func__", None)
    if "fused_lm_head" in (getattr(function, "__kwdefaults__", None) or {}):
        record.note(TRLS_HEAD, "leaves the head to TRL")
