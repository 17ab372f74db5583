"""Exceptions of a simulator, encoded as plain data to leave the simulator's process."""

from __future__ import annotations

import builtins
import traceback
from typing import Any

from agentfly.core import errors
from agentfly.core.errors import error_message
from agentfly.resources.environments.pickling import dumps, loads
from agentfly.resources.environments.wire_format import encode
from agentfly.resources.environments.wire_types import DeclaredTypes, NotSerializable, qualified_name

ErrorFields = tuple[str, str, tuple[Any, ...] | None, dict[str, Any], str, str]
"""The type of an exception, the nearest built-in one that it derives from, what it was made with (None if that is no
data), its attributes, its message and its traceback."""

_MOST_CHARACTERS = 100_000
_ANY = DeclaredTypes()


class RemoteError(Exception):
    """An exception of a simulator whose own type does not exist here.

    Its class has the name of that type and derives from the same built-in exception, so that ``except ValueError``
    catches it where it would have caught the original.
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def encode_error(error: Exception) -> ErrorFields:
    """An exception as data. In the simulator's process."""
    own = error.__traceback__
    while own is not None and own.tb_frame.f_globals.get("__package__") == __package__:
        own = own.tb_next  # the frames of this package say nothing to the author of the simulator
    trace = "".join(traceback.format_exception(type(error), error, own)) if own else ""
    attributes = {name: value for name, value in error.__dict__.items() if _is_data(value)}
    base = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return qualified_name(type(error)), base.__name__, _arguments(error), attributes, error_message(error), trace


def pickle_error(error: Exception) -> bytes | None:
    """An exception as a pickle; None if it cannot be restored from one."""
    try:
        # Pickling would make the exception again by calling its type with `args`, which is wrong or fails for types
        # whose `__init__` takes something else. Those written in Python are therefore taken apart and put together.
        if type(error).__reduce__ is BaseException.__reduce__ and not _is_built_in(type(error)):
            parcel = dumps((type(error), error.args, error.__dict__), ("its type", "args", "attributes"))
        else:
            parcel = dumps((error,), ("the exception",))
        _unpickled(parcel)
    except Exception:
        return None
    return parcel


def decode_error(told: ErrorFields, types: DeclaredTypes, parcel: bytes | None = None) -> Exception:
    """Return the exception itself if its type is built in, AgentFly's or declared; else one of the same name.

    Args:
        told: the result of `encode_error`, which the simulator's process may have forged.
        types: the declared types.
        parcel: the result of `pickle_error`, if the simulator is trusted.

    Raises:
        TypeError, ValueError: ``told`` does not describe an exception.
    """
    name, base, arguments, attributes, message, trace = told
    if not all(isinstance(text, str) for text in (name, base, message, trace)) or not isinstance(attributes, dict):
        raise TypeError("an exception is told in texts")
    message = message[:_MOST_CHARACTERS]
    error = _unpickled_or_none(parcel) or _restore(name, arguments, attributes, message, types)
    if error is None:
        error = _substitute(name, base, message)
        _take_attributes(error, {"__notes__": attributes.get("__notes__")})
    if trace:
        error.add_note(f"In its process:\n{trace[-_MOST_CHARACTERS:].rstrip()}")
    return error


def _is_built_in(kind: type) -> bool:
    return kind.__module__ == "builtins"


def _is_data(value: Any) -> bool:
    try:
        encode(value, _ANY)
    except NotSerializable:
        return False
    return True


def _arguments(error: Exception) -> tuple[Any, ...] | None:
    """Return the arguments of an exception; None if they are not plain data."""
    arguments: Any = error.args
    if _is_built_in(type(error)):  # which may have kept more of it, as the name of a file
        arguments = error.__reduce__()[1]
    return arguments if isinstance(arguments, tuple) and _is_data(arguments) else None


def _restore(
    name: str, arguments: Any, attributes: dict[str, Any], message: str, types: DeclaredTypes
) -> Exception | None:
    kind = _builtin_type(name) or types.exception_type(name)
    if kind is None or not isinstance(arguments, tuple):
        return None
    try:
        if _is_built_in(kind):
            error = kind(*arguments)
        else:  # whose own __init__ may take something else, and is not called
            base: Any = next(one for one in kind.__mro__ if _is_built_in(one))
            error = base.__new__(kind, *arguments)
            error.args = arguments
        _take_attributes(error, attributes)
    except Exception:
        return None
    return error if error_message(error)[:_MOST_CHARACTERS] == message else None


def _take_attributes(error: Exception, attributes: dict[str, Any]) -> None:
    """Set the received attributes on an exception, without running code of its class."""
    notes = attributes.pop("__notes__", None)
    for note in notes if isinstance(notes, list) else ():
        error.add_note(str(note)[:_MOST_CHARACTERS])
    for name, value in attributes.items():
        if isinstance(name, str) and not hasattr(type(error), name):
            error.__dict__[name] = value


def _builtin_type(name: str) -> type[Exception] | None:
    """An exception that is built in, or one of AgentFly's own."""
    module, _, short = name.partition(":")
    place = {"builtins": builtins, "agentfly.core.errors": errors}.get(module)
    kind = vars(place).get(short) if place is not None else None
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None


def _substitute(name: str, base: str, message: str) -> Exception:
    """An exception of a class that is made for it."""
    module, _, qualname = name.partition(":")
    short = qualname.rpartition(".")[2]
    if not short.isidentifier() or len(name) > 300:
        return RemoteError(f"{short[:100]!r}: {message}")
    above: Any = _builtin_type(f"builtins:{base}") or Exception
    bases = (RemoteError,) if above is Exception or issubclass(above, BaseExceptionGroup) else (RemoteError, above)
    kind: Any = type(short, bases, {"__module__": module, "__qualname__": qualname})
    error: Exception = kind.__new__(kind)
    error.args = (message,)
    return error


def _unpickled_or_none(parcel: bytes | None) -> Exception | None:
    try:
        return None if parcel is None else _unpickled(parcel)
    except Exception:  # its type's module cannot be imported here
        return None


def _unpickled(parcel: bytes) -> Exception:
    parts = loads(parcel)
    if len(parts) == 1:
        whole = parts[0]
        if not isinstance(whole, Exception):
            raise TypeError("its pickle gives something else")
        return whole
    kind, args, attributes = parts
    error: Exception = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error
