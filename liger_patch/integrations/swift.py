"""ms-swift's callback: the model is patched when its trainer is built. With a file ``plugin.py`` of
one line, ``import liger_patch.integrations.swift``:

    swift sft --external_plugins plugin.py --callbacks liger_patch

Interface: ``swift.callbacks.callbacks_map`` and ``_compute_acc`` of the trainers of ms-swift 4.6.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from swift.callbacks import callbacks_map  # pyright: ignore[reportMissingImports]
from torch import Tensor

from liger_patch.deferred.tensor import DeferredLogits
from liger_patch.integrations.metrics import preprocess_logits_for_metrics
from liger_patch.integrations.transformers import LigerPatchCallback


class SwiftCallback(LigerPatchCallback):
    """``LigerPatchCallback`` as ms-swift makes it, with the defaults of ``apply_patch``. Accuracies
    of tokens are computed without logits, and in evaluations only, as with Liger's kernels.

    Args:
        args: of the trainer.
        trainer: of ms-swift.
    """

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__()
        own = getattr(trainer, "_compute_acc", None)
        if own is not None:
            trainer._compute_acc = partial(_accuracy, trainer, own)


def _accuracy(trainer: Any, own: Any, outputs: Any, labels: Tensor, **how: Any) -> None:
    logits = outputs.logits
    if isinstance(logits, DeferredLogits) and not logits.is_computed:
        if trainer.model.training:
            return
        if logits.shape[:2] == labels.shape and trainer.template.sequence_parallel_size == 1:
            is_top1 = preprocess_logits_for_metrics(logits, labels)[..., 1] > 0
            predicted = torch.where(is_top1, labels.roll(-1, 1), -1)
            outputs = SimpleNamespace(logits=SimpleNamespace(argmax=lambda dim: predicted))
    own(outputs, labels, **how)


callbacks_map["liger_patch"] = SwiftCallback
