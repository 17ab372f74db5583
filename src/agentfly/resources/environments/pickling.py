"""Python values as bytes, for another process of this machine.

Importable objects travel by name. Others, such as a class of a notebook or a function of a script, travel by value
with cloudpickle. A value that cannot be pickled is refused with the path of the offending part.
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

_LEVELS, _PARTS = 20, 1000  # that are searched for what cannot travel

# cloudpickle keeps the modules that it pickles by value in one table for the whole process.
_BY_VALUE = threading.Lock()


def dumps(parts: tuple[Any, ...], names: tuple[str, ...]) -> bytes:
    """The parts as bytes; `loads` gives the tuple back.

    Args:
        parts: the values.
        names: what each is called in an error.

    Raises:
        UsageError: a part cannot travel. The message names the attribute path of what is to blame.
    """
    return _packed(parts, parts, names)


def _packed(whole: Any, parts: tuple[Any, ...], names: tuple[str, ...]) -> bytes:
    try:
        return _dumps(whole)
    except Exception as error:
        for part, name in zip(parts, names, strict=True):
            if not _travels(part):
                path, culprit = find_unpicklable(part, name, _travels)
                raise UsageError(
                    f"{path} is a {type(culprit).__module__}.{type(culprit).__qualname__} and cannot travel to another "
                    f"process ({error}). Make it inside the process instead, in the factory or at its first use."
                ) from error
        raise


def loads(parcel: bytes) -> Any:
    """The inverse of `dumps`."""
    return pickle.loads(parcel)


def dumps_plain(value: Any) -> bytes:
    """A value as bytes, which `loads` gives back, without loading cloudpickle where plain pickling does.

    For the side that holds no ``__main__``.

    Raises:
        UsageError: the value cannot travel.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return _packed(value, (value,), ("the result",))


def _dumps(value: Any) -> bytes:
    import cloudpickle  # here, because a process that only opens parcels starts faster without it

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
    """Modules of what lies at the surface of a parcel: the factory, arguments, their types."""
    values = [*value] if isinstance(value, tuple) else [value]
    values += [part for item in values if isinstance(item, (tuple, list)) for part in item]
    values += [part for item in values if isinstance(item, Mapping) for part in item.values()]
    names = {
        getattr(item, "__module__", None) or ""
        for value in values
        for item in (value, getattr(value, "func", None), type(value))
    }
    return {sys.modules[name] for name in names if name in sys.modules and name != "__main__"}


@lru_cache(maxsize=1024)  # it searches the file system, and is asked at every call
def is_importable(name: str) -> bool:
    """Whether a fresh process with this process's path would find the module ``name``."""
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


def _travels(value: Any) -> bool:
    try:
        _dumps(value)
    except Exception:
        return False
    return True


def find_unpicklable(value: Any, path: str, travels: Callable[[Any], bool]) -> tuple[str, Any]:
    """The deepest part of ``value`` that cannot travel, and its path, as far as it is found within reasonable time."""
    seen: set[int] = set()
    while id(value) not in seen and len(seen) < _LEVELS:
        seen.add(id(value))
        for name, part in islice(_parts(value), _PARTS):
            if id(part) not in seen and not travels(part):
                path, value = path + name, part
                break
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Return the parts of a value, each with the text that leads to it."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{place}]", item) for place, item in enumerate(value))
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
        yield from ((f", default {place}", item) for place, item in enumerate(value.__defaults__ or ()))
    elif isinstance(value, type):
        yield from ((f".{name}", item) for name, item in vars(value).items() if not name.startswith("__weakref__"))
    else:
        yield from ((f".{name}", item) for name, item in getattr(value, "__dict__", {}).items())
        for name in ("func", "args", "keywords"):  # of a functools.partial
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)
