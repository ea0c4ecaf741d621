"""Which rows of the registry a test runs on.

Rows of the families in FAMILIES run every test. All others, and text models beside the row that
holds them (gemma3_text), run ``tests/test_every_architecture.py`` and, marked ``all_models``
(``make test-all``), every test too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import transformers

from liger_patch.registry import ARCHITECTURES, Architecture, available, missing

IS_NEWEST = not missing()  # of the versions of Transformers that all rows were made for

FAMILIES = ("Llama", "Gemma", "Qwen")
OTHERS = (  # whose TRL head, and whose layers of each kind, tests know
    "cohere",
    "cohere2",
    "glm4",
    "granite",
    "granitemoe",
    "llava",
    "ministral3",
    "mistral",
    "mistral3",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi",
    "phi3",
    "smollm3",
    "starcoder2",
)
# Transformers 5.24: its forward reads an attribute that its text model's outputs lack
RAISE_IN_EAGER = ("llama4",)


def model_type(row: Architecture) -> str:
    return row.model_type


@contextmanager
def skipped_where_eager_fails(model_type: str) -> Iterator[None]:
    """As some rows do in a Transformers that is older, or has a bug that is known."""
    try:
        yield
    except Exception as error:
        if IS_NEWEST and model_type not in RAISE_IN_EAGER:
            raise
        pytest.skip(f"Transformers {transformers.__version__}: {type(error).__name__}: {error}")


def is_known_well(row: Architecture) -> bool:
    """Whether tests say of a row more than that it computes what eager computes."""
    return row.family in FAMILIES or row.model_type in OTHERS


def every_row(rows: Iterable[Architecture] | None = None) -> list[Any]:
    """These rows (all that there are) as parameters of a test, marked as said above."""
    return [pytest.param(row, marks=_marks(row)) for row in (available() if rows is None else rows)]


def _marks(row: Architecture) -> Any:
    if row.model_type in RAISE_IN_EAGER and transformers.__version__.startswith("5.24."):
        return pytest.mark.skip(f"Transformers {transformers.__version__} raises in eager")
    whole, text, _ = row.model_type.partition("_text")
    is_held = bool(text) and whole in {each.model_type for each in ARCHITECTURES}
    return () if row.family in FAMILIES and not is_held else pytest.mark.all_models
