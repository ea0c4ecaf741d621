"""LLaMA-Factory: a kernel plugin for its v1 trainer, and its older trainer with a callback.

    python -m liger_patch.integrations.llamafactory train.yaml

runs ``llamafactory-cli train train.yaml`` on a patched model. Scripts of the v1 trainer import this
module, and name the plugin in their configuration (``kernel_config: {name: liger_patch,
include_kernels: auto}``). Interfaces: LLaMA-Factory 0.9.5.
"""

from __future__ import annotations

import sys
from typing import Any

from llamafactory.v1.plugins.model_plugins.kernels.interface import (  # pyright: ignore[reportMissingImports]
    KernelPlugin,
)

from liger_patch.apply import apply_patch
from liger_patch.integrations.transformers import LigerPatchCallback


@KernelPlugin("liger_patch").register()
def patch_model(model: Any, include_kernels: str | bool | None = None) -> Any:
    """Patch a model that LLaMA-Factory has loaded.

    Args:
        include_kernels: "auto" or True for all layers; names of layers with commas between them
            ("rms_norm,lora"); "none" for the loss alone; None or False for no patch.
    """
    if not include_kernels:
        return model
    names = [name.strip() for name in str(include_kernels).split(",") if name.strip()]
    if include_kernels is True or names == ["auto"]:
        return apply_patch(model)
    return apply_patch(model, layers=False if names == ["none"] else names)


def main() -> None:
    """Train with LLaMA-Factory's older trainer, which reads its arguments from ``sys.argv``."""
    from llamafactory.train.tuner import run_exp  # pyright: ignore[reportMissingImports]

    if sys.argv[1:2] == ["train"]:
        del sys.argv[1]
    run_exp(callbacks=[LigerPatchCallback()])


if __name__ == "__main__":
    main()
