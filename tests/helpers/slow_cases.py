"""Cases that only `make test-all` runs."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest


def slow_but(quick: Collection[Any], values: Sequence[Any]) -> list[Any]:
    """All values for ``parametrize``, those marked slow that are not among the quick ones."""
    assert all(each in values for each in quick)
    return [each if each in quick else _slow(each) for each in values]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
