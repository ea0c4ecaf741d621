"""LLaMA-Factory's trainer with a callback that patches the model.

    python -m liger_patch.integrations.llamafactory train train.yaml

runs ``llamafactory-cli train train.yaml`` on a patched model. Interface: LLaMA-Factory 0.9.5.
"""

from __future__ import annotations

import sys

from liger_patch.integrations.transformers import LigerPatchCallback


def main() -> None:
    """Train with LLaMA-Factory, which reads its arguments from ``sys.argv``."""
    from llamafactory.train.tuner import run_exp  # pyright: ignore[reportMissingImports]

    if sys.argv[1:2] == ["train"]:
        del sys.argv[1]
    run_exp(callbacks=[LigerPatchCallback()])


if __name__ == "__main__":
    main()
