"""Run a function's own code with other globals: a copy of it, while the function itself stays. And
the table that a copy finds in the place of one of Transformers'.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


class OtherTable:
    """A table of Transformers, by the names that a configuration gives, with other functions in
    the place of some of its own.
    """

    def __init__(self, table: Any, others: dict[Callable[..., Any], Callable[..., Any]]) -> None:
        self._table, self._others = table, others

    def __getitem__(self, name: str) -> Any:
        function = self._table[name]
        return self._others.get(function, function)

    def get_interface(self, name: str, default: Any) -> Any:
        function = self._table.get_interface(name, default)
        return self._others.get(function, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)


def with_other_globals(
    function: Any, values: dict[str, Any]
) -> tuple[Callable[..., Any], Callable[[], None]]:
    """Return the same code with other globals, and a function that looks all of them up again in
    the function's module.

    A global of ``values`` is used unless the module's own value of that name has been replaced
    since.

    Args:
        values: by the names of the globals that they replace.
    """
    module = function.__globals__
    own = {name: module[name] for name in values}
    found = {**module, **values}
    # with a __name__, Dynamo would look globals up in that module
    found.pop("__name__", None)
    other = types.FunctionType(
        function.__code__, found, function.__name__, function.__defaults__, function.__closure__
    )
    other.__kwdefaults__ = function.__kwdefaults__
    others = [e for e in names_in(function.__code__) if e in module and e not in values]

    def look_up() -> None:
        for name, value in values.items():
            current = module.get(name)
            found[name] = value if current is own[name] else current
        for each in others:
            if each in module:
                found[each] = module[each]

    return other, look_up


def names_in(code: types.CodeType) -> set[str]:
    """Return the names in the code of a function and of the functions within it."""
    within = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*(names_in(each) for each in within))


def decorated_again(function: Any, other: Callable[..., Any]) -> Any:
    """Return a decorated function with ``other`` in the place of the function within its
    decorators, None where that is no variable of each decorator.

    Args:
        function: with decorators that ``functools.wraps`` has marked, or with none. Transformers
            5.24 decorates all forwards that take a cache.
    """
    within = getattr(function, "__wrapped__", None)
    if within is None:
        return other
    again = decorated_again(within, other)
    closure = getattr(function, "__closure__", None) or ()
    places = [i for i, cell in enumerate(closure) if _holds(cell, within)]
    if again is None or len(places) != 1:
        return None
    cells = [*closure]
    cells[places[0]] = types.CellType(again)
    decorated = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    decorated.__kwdefaults__ = function.__kwdefaults__
    vars(decorated).update(vars(function))
    return functools.update_wrapper(decorated, again)


def _holds(cell: types.CellType, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # empty
        return False
