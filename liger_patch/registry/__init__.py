"""Find a model's row among the architectures that the tests cover."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

import transformers

from liger_patch.registry.architectures import ARCHITECTURES, Architecture

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ARCHITECTURES", "Architecture", "available", "find", "missing", "row_of"]
CLOSEST = 3  # rows that an error names


def row_of(model: PreTrainedModel) -> Architecture | None:
    """Return the row of `model`, whose class may be a subclass of the row's; None without one."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    class_names = {cls.__name__ for cls in type(model).__mro__}
    for row in ARCHITECTURES:
        if row.model_type == model_type and row.class_name in class_names:
            return row
    return None


def find(model: PreTrainedModel) -> Architecture:
    """Return the row of `model`.

    Raises ValueError, naming the most similar rows, where there is none.
    """
    row = row_of(model)
    if row is not None:
        return row
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    rows = [f"{row.model_type}: {row.class_name}" for row in ARCHITECTURES]
    closest = get_close_matches(f"{model_type}: {type(model).__name__}", rows, CLOSEST, cutoff=0.0)
    raise ValueError(
        f"model is a {type(model).__name__} with config.model_type {model_type!r}, which has no "
        f"row in liger_patch.registry. The most similar of its {len(rows)} rows are "
        f"{'; '.join(closest)}. docs/models.md and liger_patch.registry.available() list all"
    )


def available() -> list[Architecture]:
    """Return the rows whose class the installed Transformers has."""
    exported = _exported_names()
    return [row for row in ARCHITECTURES if row.class_name in exported]


def missing() -> list[Architecture]:
    """Return the rows whose class the installed Transformers does not have."""
    exported = _exported_names()
    return [row for row in ARCHITECTURES if row.class_name not in exported]


def _exported_names() -> frozenset[str]:
    # The lazy module lists its names here; hasattr() would import each class's modeling file.
    return frozenset(vars(transformers)["__all__"])
