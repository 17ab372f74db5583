"""Transient errors: exceptions of user code that the machine or the network caused, and not the model.

Exceptions of client packages are recognised by package and class name, so that none of the packages is imported.
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
"""HTTP statuses that say that a server is temporarily unavailable."""

_GRPC_UNAVAILABLE = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})


def is_unavailable_error(error: BaseException) -> bool:
    """Whether an exception of a known package reports a network failure or an unavailable server."""
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
    """Return the HTTP status of the answer that an exception reports."""
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
    """Return the transient error that an exception is or was caused by; None if there is none.

    Transient errors are: a refused or broken connection; an unreachable or unknown host; a lack of memory, disk,
    processes or open files; network failures and "unavailable" answers reported by client packages
    (`is_unavailable_error`); and AgentFly's own infrastructure failures. The search follows causes, contexts and
    exception groups. Anything else, such as a missing file, may have been caused by the model.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        if _is_transient(one):
            return one
        seen.add(id(one))
        waiting.append(one.__cause__ if one.__suppress_context__ else one.__context__)
        waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
    return None


def is_retryable(error: BaseException) -> bool:
    """Whether a retry may succeed: the error is transient and needs no repair first.

    Errors that the model can cause, wrong uses of AgentFly and missing prerequisites are not retryable.
    """
    if isinstance(error, AgentFlyError) and error.by_policy:
        return False
    lasting = (UsageError, PrerequisiteError, TokenInvariantError, EngineClosed, LeaseExpired)
    transient = find_transient_error(error)
    return transient is not None and not isinstance(transient, lasting)


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, AgentFlyError):
        return not error.by_policy
    if isinstance(error, (ConnectionError, MemoryError, socket.gaierror)):
        return True
    if isinstance(error, OSError) and error.errno in _MACHINE_OR_NETWORK:
        return True
    return is_unavailable_error(error)
