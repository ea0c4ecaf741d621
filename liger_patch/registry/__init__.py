"""Find a model's row among the architectures that the tests cover."""

from __future__ import annotations

from typing import TYPE_CHECKING

import transformers

from liger_patch.registry.architectures import ARCHITECTURES, Architecture
from liger_patch.subclass import ORIGINAL, is_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ARCHITECTURES", "Architecture", "available", "find", "is_tested", "missing", "row_of"]


def row_of(model: PreTrainedModel) -> Architecture | None:
    """Return the row of `model`, whose class may be a subclass of the row's; None without one."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    class_names = {cls.__name__ for cls in type(model).__mro__}
    for row in ARCHITECTURES:
        if row.model_type == model_type and row.class_name in class_names:
            return row
    return None


def is_tested(model: PreTrainedModel) -> bool:
    """Return whether `model` has a row, and its class runs Transformers' own forward: no row says
    what another forward does with its labels.
    """
    return row_of(model) is not None and not _has_own_forward(model)


def find(model: PreTrainedModel) -> Architecture:
    """Return the row of `model`.

    Raises ValueError where there is none, or where the class of `model` has a forward of its own.
    """
    row = row_of(model)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if row is not None and _has_own_forward(model):
        raise ValueError(
            f"model is a {type(model).__name__} with config.model_type {model_type!r}, whose "
            f"forward is not that of Transformers: the row of {row.class_name} in "
            "liger_patch.registry does not cover it"
        )
    if row is not None:
        return row
    raise ValueError(
        f"model is a {type(model).__name__} with config.model_type {model_type!r}, which has no "
        "row in liger_patch.registry: docs/models.md and liger_patch.registry.available() list all"
    )


def available() -> list[Architecture]:
    """Return the rows whose class the installed Transformers has."""
    exported = _exported_names()
    return [row for row in ARCHITECTURES if row.class_name in exported]


def missing() -> list[Architecture]:
    """Return the rows whose class the installed Transformers does not have."""
    exported = _exported_names()
    return [row for row in ARCHITECTURES if row.class_name not in exported]


def _has_own_forward(model: PreTrainedModel) -> bool:
    """Return whether the class of the model, before it was patched, has another forward than
    Transformers'.
    """
    cls = getattr(type(model), ORIGINAL, type(model))
    return not is_transformers(getattr(cls, "forward", None))


def _exported_names() -> frozenset[str]:
    # The lazy module lists its names here; hasattr() would import each class's modeling file.
    return frozenset(vars(transformers)["__all__"])
