"""Pickles of Python values, for another process of this machine.

Importable objects are pickled by name. Others, such as a class of a notebook or a function of a script, are pickled by
value with cloudpickle. A value that cannot be pickled is refused with the path of the offending part.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from agentfly.core.errors import UsageError

_LEVELS, _PARTS = 20, 1000  # limits of the search for a part that cannot be pickled

# cloudpickle keeps the modules that it pickles by value in one table for the whole process.
_BY_VALUE = threading.Lock()


def dumps(parts: tuple[Any, ...], names: tuple[str, ...]) -> bytes:
    """Pickle several values. `loads` returns them as a tuple.

    Args:
        parts: the values.
        names: the name of each value, for messages.

    Raises:
        UsageError: a part cannot be pickled. The message contains the path of the offending part.
    """
    return _packed(parts, parts, names)


def _packed(whole: Any, parts: tuple[Any, ...], names: tuple[str, ...]) -> bytes:
    try:
        return _dumps(whole)
    except Exception as error:
        for part, name in zip(parts, names, strict=True):
            if not _can_be_pickled(part):
                path, culprit = find_unpicklable(part, name, _can_be_pickled)
                raise UsageError(
                    f"{path} is a {type(culprit).__module__}.{type(culprit).__qualname__} and cannot be sent to "
                    f"another process ({error}). Create it inside the process instead, in the factory or at its first "
                    "use."
                ) from error
        raise


def loads(pickled: bytes) -> Any:
    """Unpickle the result of `dumps`."""
    return pickle.loads(pickled)


def dumps_plain(value: Any) -> bytes:
    """Pickle a value for `loads`. Import cloudpickle only if plain pickling fails.

    For the process without the user's ``__main__``.

    Raises:
        UsageError: the value cannot be pickled.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return _packed(value, (value,), ("the result",))


def _dumps(value: Any) -> bytes:
    import cloudpickle  # lazy, because a process that only unpickles starts faster without it

    with _BY_VALUE:
        modules = [module for module in _modules_of(value) if not is_importable(module.__name__)]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            return bytes(cloudpickle.dumps(value))
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def _modules_of(value: Any) -> set[ModuleType]:
    """Return the modules of the outermost values: the factory, its arguments and their types."""
    values = [*value] if isinstance(value, tuple) else [value]
    values += [part for item in values if isinstance(item, (tuple, list)) for part in item]
    values += [part for item in values if isinstance(item, Mapping) for part in item.values()]
    names = {
        getattr(item, "__module__", None) or ""
        for value in values
        for item in (value, getattr(value, "func", None), type(value))
    }
    return {sys.modules[name] for name in names if name in sys.modules and name != "__main__"}


@lru_cache(maxsize=1024)  # it searches the file system, and is called for every request
def is_importable(name: str) -> bool:
    """Return whether a new process with the same module search path would find the module ``name``."""
    if name in sys.builtin_module_names:
        return True
    path: Any = None
    prefix = ""
    for part in name.split("."):
        prefix = f"{prefix}.{part}" if prefix else part
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((found for finder in finders if (found := finder.find_spec(prefix, path))), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def _can_be_pickled(value: Any) -> bool:
    try:
        _dumps(value)
    except Exception:
        return False
    return True


def find_unpicklable(value: Any, path: str, can_send: Callable[[Any], bool]) -> tuple[str, Any]:
    """Return the deepest part of a value that cannot be sent, and its path. The search is bounded."""
    seen: set[int] = set()
    while id(value) not in seen and len(seen) < _LEVELS:
        seen.add(id(value))
        for name, part in islice(_parts(value), _PARTS):
            if id(part) not in seen and not can_send(part):
                path, value = path + name, part
                break
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with its path from the value."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, FunctionType):
        cells: tuple[CellType, ...] = value.__closure__ or ()
        yield from (
            (f", variable {name!r}", cell.cell_contents)
            for name, cell in zip(value.__code__.co_freevars, cells, strict=True)
        )
        yield from (
            (f", global {name!r}", value.__globals__[name])
            for name in value.__code__.co_names
            if name in value.__globals__
        )
        yield from ((f", default {index}", item) for index, item in enumerate(value.__defaults__ or ()))
    elif isinstance(value, type):
        yield from ((f".{name}", item) for name, item in vars(value).items() if not name.startswith("__weakref__"))
    else:
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())
        for name in ("func", "args", "keywords"):  # of a functools.partial
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)
