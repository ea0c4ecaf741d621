"""Cases that only `make test-all` runs."""

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from kernel_forms import INTERPRETED


def slow_but(
    quick: Collection[Any], values: Sequence[Any], interpreted: Collection[Any] | None = None
) -> list[Any]:
    """All values for ``parametrize``, those marked slow that are not among the quick ones.
    ``interpreted``: the quick ones under Triton's interpreter, if they are others.
    """
    if INTERPRETED and interpreted is not None:
        quick = interpreted
    assert all(each in values for each in quick)
    return [each if each in quick else _slow(each) for each in values]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)


def pairwise(*lists: Iterable[Any]) -> list[Any]:
    """Every combination for ``parametrize``; quick: a few in which each two values of two lists
    meet.
    """
    values = [list(each) for each in lists]
    cases = list(product(*(range(len(each)) for each in values)))
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing, quick = set().union(*pairs.values()), set()
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        quick.add(best)
        missing -= pairs[best]
    return [
        pytest.param(
            *(each[i] for each, i in zip(values, case, strict=True)),
            id="-".join(str(each[i]) for each, i in zip(values, case, strict=True)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in cases
    ]


def each_pair(**lists: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with ``pairwise`` values of its arguments."""
    return pytest.mark.parametrize(tuple(lists), pairwise(*lists.values()))
