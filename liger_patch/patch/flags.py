"""The environment variables, read at every forward pass; LIGER_PATCH_STRICT by ``apply_patch``,
LIGER_PATCH_VERL when verl loads its plugins.
"""

import functools
import os
import warnings
from difflib import get_close_matches

PREFIX = "LIGER_PATCH_"
RETURN_LOGITS = "LIGER_PATCH_RETURN_LOGITS"
NAMES = (
    RETURN_LOGITS,
    "LIGER_PATCH_STRICT",
    "LIGER_PATCH_CHUNK_MIB",
    "LIGER_PATCH_VERL",
)


def warn_of_unknown() -> None:
    """Warn, once each, of environment variables that begin as ours and are none of them."""
    for name in os.environ:
        if name.startswith(PREFIX) and name not in NAMES:
            _warn_of(name)


@functools.cache
def _warn_of(name: str) -> None:
    ends = {each.removeprefix(PREFIX): each for each in NAMES}
    closest = get_close_matches(name.removeprefix(PREFIX), ends, 1, 0.75)
    meant = "".join(f": is {ends[each]} meant?" for each in closest)
    warnings.warn(f"liger_patch reads no {name}{meant}", stacklevel=4)


def return_logits() -> bool | None:
    """Return LIGER_PATCH_RETURN_LOGITS: True for real logits, False for fused or an error, None for
    automatic.
    """
    return _switch(RETURN_LOGITS)


def strict() -> bool:
    """Return LIGER_PATCH_STRICT: whether ``apply_patch`` takes tested architectures only."""
    return bool(_switch("LIGER_PATCH_STRICT"))


def verl() -> bool:
    """Return LIGER_PATCH_VERL: whether verl's fused head is replaced."""
    return bool(_switch("LIGER_PATCH_VERL"))


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
