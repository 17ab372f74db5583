"""Outage: an exception of a tool's code that the machine or the network is to blame for, not the model."""

from __future__ import annotations

import errno
import socket
import sys

from agentfly.errors import AgentFlyError

_MACHINE_OR_NETWORK = frozenset(
    {
        errno.ENOSPC,  # the disk is full
        errno.EDQUOT,
        errno.EIO,
        errno.EMFILE,  # too many open files
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,  # no process or thread can be had
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ETIMEDOUT,  # of a connection
    }
)


def outage_in(error: BaseException) -> BaseException | None:
    """The outage that an exception is or came from, if there is one.

    An outage is a connection that was refused or broke, a host that cannot be reached or whose name is not known, too
    little memory, disk, processes or open files, an error of transport of httpx, and any failure of AgentFly's that is
    infrastructure. What came from an outage is one too: its cause, the exception that was being handled, and the
    exceptions of a group are looked at. Everything else, for instance a missing file, may be the model's doing.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        if _is_outage(one):
            return one
        seen.add(id(one))
        waiting.append(one.__cause__ if one.__suppress_context__ else one.__context__)
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
    return None


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, AgentFlyError):
        return not error.by_policy
    if isinstance(error, (ConnectionError, MemoryError, socket.gaierror)):
        return True
    if isinstance(error, OSError) and error.errno in _MACHINE_OR_NETWORK:
        return True
    httpx = sys.modules.get("httpx")  # not imported: an exception of its can only come from one who has
    return httpx is not None and isinstance(error, httpx.TransportError)
