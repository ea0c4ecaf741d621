"""ms-swift's callback: the model is patched when its trainer is built. With a file ``plugin.py`` of
one line, ``import liger_patch.integrations.swift``:

    swift sft --external_plugins plugin.py --callbacks liger_patch

Interface: ``swift.callbacks.callbacks_map`` of ms-swift 4.6.
"""

from __future__ import annotations

from typing import Any

from swift.callbacks import callbacks_map  # pyright: ignore[reportMissingImports]

from liger_patch.integrations.transformers import LigerPatchCallback


class SwiftCallback(LigerPatchCallback):
    """``LigerPatchCallback`` as ms-swift makes it, with the defaults of ``apply_patch``.

    Args:
        args: of the trainer.
        trainer: of ms-swift.
    """

    def __init__(self, args: Any, trainer: Any) -> None:
        super().__init__()


callbacks_map["liger_patch"] = SwiftCallback
