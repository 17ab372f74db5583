"""Outage: an exception of a tool's code that the machine or the network is to blame for, not the model."""

from __future__ import annotations

import errno
import socket

from agentfly.agents.client_errors import is_client_failure
from agentfly.errors import (
    AgentFlyError,
    EngineClosed,
    LeaseOver,
    PrerequisiteError,
    TokenInvariantError,
    UsageError,
)

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
    little memory, disk, processes or open files, what clients of HTTP, gRPC, databases and the like raise where the
    network fails or the far side says that it cannot answer now (`client_errors`), and any failure of AgentFly's that
    is infrastructure. What came from an outage is one too: its cause, the exception that was being handled, and the
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


def may_pass(error: BaseException) -> bool:
    """Whether it may help to try again what failed with this: an outage that nobody has to mend first.

    What the model can cause and wrong uses of AgentFly do not pass by themselves, nor does what the machine lacks.
    """
    if isinstance(error, AgentFlyError) and error.by_policy:
        return False
    lasting = (UsageError, PrerequisiteError, TokenInvariantError, EngineClosed, LeaseOver)
    outage = outage_in(error)
    return outage is not None and not isinstance(outage, lasting)


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, AgentFlyError):
        return not error.by_policy
    if isinstance(error, (ConnectionError, MemoryError, socket.gaierror)):
        return True
    if isinstance(error, OSError) and error.errno in _MACHINE_OR_NETWORK:
        return True
    return is_client_failure(error)
