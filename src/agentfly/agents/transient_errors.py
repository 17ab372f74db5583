"""Client errors: what other packages raise where the network or a far side fails. None of them is imported.

An exception is known by the package and the name of its classes, since only who has a package can raise its exceptions.

Outage: an exception of a tool's code that the machine or the network is to blame for, not the model.
"""

from __future__ import annotations

import errno
import socket
from typing import Any

from agentfly.core.errors import (
    AgentFlyError,
    EngineClosed,
    LeaseExpired,
    PrerequisiteError,
    TokenInvariantError,
    UsageError,
)

_HTTP_CLIENTS = frozenset({"aiohttp", "anthropic", "botocore", "httpx", "httpx2", "openai", "requests", "urllib"})

_CONNECTION_FAILED: dict[str, frozenset[str]] = {
    "aiohttp": frozenset({"ClientConnectionError", "ClientPayloadError", "ServerDisconnectedError"}),
    "anthropic": frozenset({"APIConnectionError"}),
    "anyio": frozenset({"BrokenResourceError", "ClosedResourceError", "EndOfStream", "IncompleteRead"}),
    "asyncio": frozenset({"IncompleteReadError"}),
    "asyncpg": frozenset({"PostgresConnectionError"}),
    "botocore": frozenset({"ConnectionError", "HTTPClientError"}),
    "h11": frozenset({"RemoteProtocolError"}),
    "http": frozenset({"BadStatusLine", "IncompleteRead"}),
    "httpcore": frozenset({"NetworkError", "RemoteProtocolError", "TimeoutException"}),
    "httpx": frozenset({"TransportError"}),
    "httpx2": frozenset({"TransportError"}),
    "openai": frozenset({"APIConnectionError"}),
    "paramiko": frozenset({"SSHException"}),
    "pymongo": frozenset({"ConnectionFailure"}),
    "redis": frozenset({"ConnectionError", "TimeoutError"}),
    "requests": frozenset({"ChunkedEncodingError", "ConnectionError", "Timeout"}),
    "smtplib": frozenset({"SMTPServerDisconnected"}),
    "ssl": frozenset({"SSLError"}),
    "urllib3": frozenset(
        {"MaxRetryError", "NewConnectionError", "ProtocolError", "ProxyError", "SSLError", "TimeoutError"}
    ),
    "websockets": frozenset({"ConnectionClosed"}),
}

_UNAVAILABLE = frozenset({429, 502, 503, 504, 529})
"""HTTP statuses by which a far side says that it cannot answer now, whatever it is asked."""

_GRPC_UNAVAILABLE = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})


def is_unavailable_error(error: BaseException) -> bool:
    """Whether an exception of a known package says that the network failed, or a far side that cannot answer now."""
    packages = set()
    for kind in type(error).__mro__:
        package = kind.__module__.partition(".")[0]
        packages.add(package)
        if kind.__name__ in _CONNECTION_FAILED.get(package, ()):
            return True
    if packages & _HTTP_CLIENTS:
        return _status(error) in _UNAVAILABLE
    return "grpc" in packages and _grpc_code(error) in _GRPC_UNAVAILABLE


def _status(error: BaseException) -> int | None:
    """The HTTP status with which a far side answered."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):  # of botocore
        metadata = response.get("ResponseMetadata")
        found = metadata.get("HTTPStatusCode") if isinstance(metadata, dict) else None
    else:
        found = getattr(response, "status_code", None)
        for name in ("status_code", "status", "code"):
            found = found if isinstance(found, int) else getattr(error, name, None)
    return found if isinstance(found, int) else None


def _grpc_code(error: BaseException) -> str | None:
    code = getattr(error, "code", None)
    return getattr(code() if callable(code) else None, "name", None)


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


def find_transient_error(error: BaseException) -> BaseException | None:
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


def is_retryable(error: BaseException) -> bool:
    """Whether it may help to try again what failed with this: an outage that nobody has to mend first.

    What the model can cause and wrong uses of AgentFly do not pass by themselves, nor does what the machine lacks.
    """
    if isinstance(error, AgentFlyError) and error.by_policy:
        return False
    lasting = (UsageError, PrerequisiteError, TokenInvariantError, EngineClosed, LeaseExpired)
    outage = find_transient_error(error)
    return outage is not None and not isinstance(outage, lasting)


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, AgentFlyError):
        return not error.by_policy
    if isinstance(error, (ConnectionError, MemoryError, socket.gaierror)):
        return True
    if isinstance(error, OSError) and error.errno in _MACHINE_OR_NETWORK:
        return True
    return is_unavailable_error(error)
