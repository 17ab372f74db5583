"""References: names of objects in the user's code, ``module:name`` or ``path/file.py:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from agentfly.core.errors import AgentFlyError, ConfigError, nearest_name


def load_reference(reference: str, *, base: Path, field: str) -> Any:
    """Return the object that a reference names.

    Args:
        reference: ``module:name`` or ``path/file.py:name``.
        base: the directory that a path is relative to. Modules are searched there first.
        field: the configuration field that holds the reference, for messages.

    Raises:
        ConfigError: the reference is malformed, names nothing, or its import failed.
        AgentFlyError: raised by the user's module itself, for instance for a tool without a docstring.
    """
    home, separator, name = reference.rpartition(":")
    if not separator or not home or not name:
        raise ConfigError(
            f"{field}: {reference!r} names nothing. Write 'module:name' or 'path/file.py:name', for instance "
            f"'my_agent.py:{field.strip('-')}'."
        )
    module = _module_of_file(home, base, field) if home.endswith(".py") else _module(home, base, field)
    try:
        return getattr(module, name)
    except AttributeError:
        near = nearest_name(name, vars(module))
        hint = f" Did you mean {near!r}?" if near else ""
        raise ConfigError(f"{field}: there is no {name!r} in {home}.{hint}") from None


def _module(name: str, base: Path, field: str) -> ModuleType:
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))
    importlib.invalidate_caches()
    _require_own(name, base, field)
    try:
        return importlib.import_module(name)
    except AgentFlyError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{field}: there is no module {name!r}. It was looked for in {base} and among the installed packages."
            ) from error
        raise _import_failure(name, field, error) from error
    except Exception as error:
        raise _import_failure(name, field, error) from error


def _require_own(name: str, base: Path, field: str) -> None:
    """Raise if a module of that name was imported from elsewhere and the directory has another.

    Raises:
        ConfigError: it has.
    """
    known = getattr(sys.modules.get(name), "__file__", None)
    stem = base.joinpath(*name.split("."))
    for file in (stem / "__init__.py", stem.with_suffix(".py")):
        if known is not None and file.is_file() and file.resolve() != Path(known).resolve():
            raise ConfigError(
                f"{field}: the module {name!r} of {base} cannot be imported, because this process has imported "
                f"another one of that name ({known}). Name it by its file: {file.relative_to(base)}:NAME."
            )


def _module_of_file(path: str, base: Path, field: str) -> ModuleType:
    """Import a file as a module with a unique name. It is pickled by value, for processes that cannot import it."""
    file = (base / path).resolve()
    if not file.is_file():
        raise ConfigError(f"{field}: there is no file {file}.")
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))  # so that the file can import modules beside it, as when Python runs it
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{field}: {file} cannot be loaded as a Python module.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, AgentFlyError) or not isinstance(error, Exception):
            raise
        raise _import_failure(str(file), field, error) from error
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    return module


def _import_failure(what: str, field: str, error: Exception) -> ConfigError:
    if isinstance(error, SyntaxError):
        message, file, line = error.msg, error.filename, error.lineno
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        message, file, line = str(error), frame.filename, frame.lineno
    return ConfigError(
        f"{field}: importing {what} failed with {type(error).__name__}: {message} ({file}, line {line})."
    )
