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
"""The type of an exception, its nearest built-in base type, its arguments (None unless they are data), its attributes,
its message and its traceback."""

_MAX_CHARACTERS = 100_000
_ANY = DeclaredTypes()


class RemoteError(Exception):
    """An exception of a simulator whose type does not exist in this process.

    Its class has the name of the original type and the same built-in base class. ``except ValueError`` therefore
    catches it if it would have caught the original.
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def encode_error(error: Exception) -> ErrorFields:
    """Encode an exception as data, in the simulator's process."""
    own = error.__traceback__
    while own is not None and own.tb_frame.f_globals.get("__package__") == __package__:
        own = own.tb_next  # the author of the simulator does not need the frames of this package
    trace = "".join(traceback.format_exception(type(error), error, own)) if own else ""
    attributes = {name: value for name, value in error.__dict__.items() if _is_data(value)}
    base = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return qualified_name(type(error)), base.__name__, _arguments(error), attributes, error_message(error), trace


def pickle_error(error: Exception) -> bytes | None:
    """Pickle an exception. Return None if it cannot be restored from the pickle."""
    try:
        # Unpickling would call the type with `args`, which is wrong or fails if its `__init__` takes other arguments.
        # Exceptions of types written in Python are therefore pickled as their parts.
        if type(error).__reduce__ is BaseException.__reduce__ and not _is_built_in(type(error)):
            pickled = dumps((type(error), error.args, error.__dict__), ("its type", "args", "attributes"))
        else:
            pickled = dumps((error,), ("the exception",))
        _unpickle(pickled)
    except Exception:
        return None
    return pickled


def decode_error(encoded: ErrorFields, types: DeclaredTypes, pickled: bytes | None = None) -> Exception:
    """Restore the exception if its type is built in, AgentFly's or declared. Otherwise return a substitute.

    Args:
        encoded: the result of `encode_error`, which the simulator's process may have forged.
        types: the declared types.
        pickled: the result of `pickle_error`, if the simulator is trusted.

    Raises:
        TypeError, ValueError: ``encoded`` does not describe an exception.
    """
    name, base, arguments, attributes, message, trace = encoded
    if not all(isinstance(text, str) for text in (name, base, message, trace)) or not isinstance(attributes, dict):
        raise TypeError("the fields of an exception are texts")
    message = message[:_MAX_CHARACTERS]
    error = _unpickle_or_none(pickled) or _restore(name, arguments, attributes, message, types)
    if error is None:
        error = _substitute(name, base, message)
        _set_attributes(error, {"__notes__": attributes.get("__notes__")})
    if trace:
        error.add_note(f"In its process:\n{trace[-_MAX_CHARACTERS:].rstrip()}")
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
    if _is_built_in(type(error)):  # its arguments may be more than `args`, such as the name of a file
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
        else:  # without its own __init__, which may take other arguments
            base: Any = next(one for one in kind.__mro__ if _is_built_in(one))
            error = base.__new__(kind, *arguments)
            error.args = arguments
        _set_attributes(error, attributes)
    except Exception:
        return None
    return error if error_message(error)[:_MAX_CHARACTERS] == message else None


def _set_attributes(error: Exception, attributes: dict[str, Any]) -> None:
    """Set the received attributes on an exception, without running code of its class."""
    notes = attributes.pop("__notes__", None)
    for note in notes if isinstance(notes, list) else ():
        error.add_note(str(note)[:_MAX_CHARACTERS])
    for name, value in attributes.items():
        if isinstance(name, str) and not hasattr(type(error), name):
            error.__dict__[name] = value


def _builtin_type(name: str) -> type[Exception] | None:
    """Return a built-in exception type, or one of AgentFly's; None for other names."""
    module, _, short = name.partition(":")
    source = {"builtins": builtins, "agentfly.core.errors": errors}.get(module)
    kind = vars(source).get(short) if source is not None else None
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else None


def _substitute(name: str, base: str, message: str) -> Exception:
    """Return an exception of a class with the original name, created for it."""
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


def _unpickle_or_none(pickled: bytes | None) -> Exception | None:
    try:
        return None if pickled is None else _unpickle(pickled)
    except Exception:  # its type's module cannot be imported here
        return None


def _unpickle(pickled: bytes) -> Exception:
    parts = loads(pickled)
    if len(parts) == 1:
        whole = parts[0]
        if not isinstance(whole, Exception):
            raise TypeError("its pickle is not an exception")
        return whole
    kind, args, attributes = parts
    error: Exception = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error
