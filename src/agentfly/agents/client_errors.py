"""Client errors: what other packages raise where the network or a far side fails. None of them is imported.

An exception is known by the package and the name of its classes, since only who has a package can raise its exceptions.
"""

from __future__ import annotations

from typing import Any

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


def is_client_failure(error: BaseException) -> bool:
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
