"""Transformers' Trainer: a callback that patches its model, for scripts that only take callbacks.

Trainer(model=model, callbacks=[LigerPatchCallback()], ...).train()
"""

from __future__ import annotations

from typing import Any

import transformers

from liger_patch.apply import apply_patch
from liger_patch.status import patch_status


class LigerPatchCallback(transformers.TrainerCallback):
    """Calls ``apply_patch(model, **options)`` when the Trainer is built, before the model is
    wrapped for training.

    Args:
        options: of ``apply_patch``.

    Raises:
        ValueError, TypeError: as ``apply_patch`` does.
        ValueError: beside ``use_liger_patch=True`` of TRL's trainers, which patches the model too,
            and ``use_liger_kernel=True``, which gives most models a forward of Liger-Kernel's.
        RuntimeError: at the beginning of training, if the model is not patched: the callback came
            too late (``trainer.add_callback``), or ``model_init`` has made another model since.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for option in ("use_liger_patch", "use_liger_kernel"):
            if getattr(args, option, False):
                words = f"LigerPatchCallback and {option}=True both patch the model"
                raise ValueError(f"{words}: leave one of them out")
        apply_patch(kwargs["model"], **self.options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from accelerate.utils import extract_model_from_parallel

        model: Any = extract_model_from_parallel(kwargs["model"])
        if not patch_status(model).patched:
            raise RuntimeError(
                "LigerPatchCallback found a model that is not patched, too late to patch it, as "
                "it may be wrapped. Give the callback to the Trainer as callbacks=[...]; if "
                "model_init makes the model, call apply_patch within model_init"
            )
