"""Exceptions of a simulator on their way out of its process."""

from __future__ import annotations

import traceback
from types import FunctionType

from agentfly.errors import message_of
from agentfly.resources.environments.parcel import pack, unpack

Answer = tuple[bytes | None, str, str, str]


class RemoteError(Exception):
    """An exception of a simulator whose own type cannot travel between processes. The message begins with its name."""


def pack_error(error: Exception) -> Answer:
    """The exception as a parcel (None if it cannot travel), its type's name, its message, and its traceback."""
    own = error.__traceback__
    while own is not None and own.tb_frame.f_globals.get("__package__") == __package__:
        own = own.tb_next  # the frames of this package say nothing to the author of the simulator
    trace = "".join(traceback.format_exception(type(error), error, own)) if own else ""
    try:
        # Pickling would make the exception again by calling its type with `args`, which is wrong or fails for types
        # whose `__init__` takes something else. Those written in Python are therefore taken apart and put together.
        if isinstance(type(error).__init__, FunctionType) and type(error).__reduce__ is BaseException.__reduce__:
            parcel = pack((type(error), error.args, error.__dict__), ("its type", "args", "attributes"))
        else:
            parcel = pack((error,), ("the exception",))
        _put_together(parcel)
    except Exception:
        parcel = None
    return parcel, type(error).__name__, message_of(error), trace


def unpack_error(parcel: bytes | None, kind: str, message: str, trace: str) -> Exception:
    """The exception as itself where it can be, with the traceback in its own process as a note."""
    error: Exception = RemoteError(f"{kind}: {message}")
    if parcel is not None:
        try:
            error = _put_together(parcel)
        except Exception as unreadable:  # its type's module cannot be imported here
            error.add_note(f"The exception itself could not be read here: {unreadable}")
    if trace:
        error.add_note(f"In its process:\n{trace.rstrip()}")
    return error


def _put_together(parcel: bytes) -> Exception:
    parts = unpack(parcel)
    if len(parts) == 1:
        whole: Exception = parts[0]
        return whole
    kind, args, attributes = parts
    error: Exception = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error
