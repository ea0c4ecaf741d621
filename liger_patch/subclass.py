"""Another class for one instance of a module: its own, with some attributes replaced. Whose code a
class runs. And a function's own code with other globals: a copy, while the function itself stays.

The instance's class changes, and nothing else: so a copy, a pickle or a replica of the instance has
the new class in its own right, and no attribute holds a reference back to it.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

OF_LIBRARIES = "transformers.", "torch.", "builtins"  # modules of classes
DESCRIPTORS = property, classmethod, staticmethod
ORIGINAL = "_liger_patch_original"  # attribute of such a class: the class before
Derive = TypeVar("Derive", bound=Callable)
_ONE_AT_A_TIME = threading.RLock()
_forwards: dict[Any, Any] = {}  # of classes that others were derived from, as last seen
_replacements = 0


def once_for_each_class(derive: Derive) -> Derive:
    """Decorate a function that derives a class: ``functools.cache``, one thread at a time."""
    cached = functools.cache(derive)

    @functools.wraps(derive)
    def derived(*of: Any) -> Any:
        with _ONE_AT_A_TIME:
            return cached(*of)

    return cast(Derive, derived)


def derived_class(original: Any, derive: Callable[[Any], Any], **attributes: Any) -> Any:
    """Derive a subclass of ``original`` of the same name and documentation.

    Args:
        derive: the function of a module that gives this class for ``original``: pickles name it.
        attributes: of the class.
    """

    def __reduce_ex__(self, protocol) -> Any:
        _, _, *state = original.__reduce_ex__(self, protocol)
        return (_new_instance, (original, derive), *state)

    namespace = {
        **attributes,
        "__reduce_ex__": __reduce_ex__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        ORIGINAL: original,
    }
    _forwards.setdefault(original, original.forward)
    return types.new_class(
        original.__name__, (original,), exec_body=lambda ns: ns.update(namespace)
    )


def count_replacements() -> int:
    """Return how many forwards of classes that others were derived from were seen to be replaced:
    a derived class does not run such a forward.
    """
    global _replacements
    for cls, forward in list(_forwards.items()):
        if cls.forward is not forward:
            _forwards[cls] = cls.forward
            _replacements += 1
    return _replacements


def own_name(cls: type) -> str:
    """Return the name of a class, or of that which FSDP2's class of a unit was made from."""
    return cls.__name__.removeprefix("FSDP")


def is_transformers(function: Any) -> bool:
    """Return whether a function, and each one that decorators have wrapped in it, is defined in
    Transformers: one that somebody has replaced is not.
    """
    while function is not None:  # functools.wraps copies __module__, but no globals
        if not getattr(function, "__globals__", {}).get("__name__", "").startswith("transformers."):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def overrides_methods(cls: type) -> bool:
    """Return whether a class that is neither Transformers' nor PyTorch's has methods of its own,
    which the code that it inherits may call; ``__init__`` and ``forward`` are not counted.
    """
    others = (each for each in cls.__mro__ if not each.__module__.startswith(OF_LIBRARIES))
    return any(
        name not in ("__init__", "forward") and (callable(value) or isinstance(value, DESCRIPTORS))
        for each in others
        for name, value in vars(each).items()
    )


def _new_instance(original: Any, derive: Callable[[Any], Any]) -> Any:
    cls = derive(original)
    return cls.__new__(cls)


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
