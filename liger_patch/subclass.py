"""Derive a class for one instance of a module: a subclass of its own with some attributes replaced.
And tell whose code a class runs.

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
        derive: returns this class for ``original``; pickles hold it, so it must be picklable.
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


def original_class(module: object) -> Any:
    """Return the class of an instance before it was given a derived one."""
    return getattr(type(module), ORIGINAL, type(module))


def count_replacements() -> int:
    """Return how often the ``forward`` of a class with derived classes was found replaced so far.
    Derived classes do not run the new one: the caller has to derive anew.
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
