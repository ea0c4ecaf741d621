"""The environment variables, read at every forward pass; LIGER_PATCH_STRICT by ``apply_patch``."""

import os


def return_logits() -> bool | None:
    """Return LIGER_PATCH_RETURN_LOGITS: True for real logits, False for fused or an error, None for
    automatic.
    """
    return _switch("LIGER_PATCH_RETURN_LOGITS")


def verify() -> bool:
    """Return LIGER_PATCH_VERIFY: whether the first training step is checked."""
    return bool(_switch("LIGER_PATCH_VERIFY"))


def strict() -> bool:
    """Return LIGER_PATCH_STRICT: whether ``apply_patch`` takes tested architectures only."""
    return bool(_switch("LIGER_PATCH_STRICT"))


def chunk_mib() -> float | None:
    """Return LIGER_PATCH_CHUNK_MIB: MiB of logits held at once, None where unset."""
    name = "LIGER_PATCH_CHUNK_MIB"
    text = os.environ.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a number of MiB > 0, got {text!r}")
    return value


def _switch(name: str) -> bool | None:
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{name} must be 0, 1 or unset, got {text!r}")
    return None if text == "" else text == "1"
