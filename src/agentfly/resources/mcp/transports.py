"""Transports of MCP sessions: a program's stdin and stdout, or HTTP.

The package ``mcp`` raises similar errors for HTTP failures and for errors of the server, and ends the whole session
when one connection breaks. The HTTP client here therefore turns an HTTP failure into a protocol error with a mark that
`transport_failure_of` recognizes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path
from typing import Any

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import MCPError
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    jsonrpc_message_adapter,
)

from agentfly.core.numbers import parse_byte_size
from agentfly.resources.credentials import Credentials
from agentfly.resources.mcp.spec import MCPServerSpec
from agentfly.resources.process.supervised import SupervisedProgram
from agentfly.resources.process.supervisor import ProgramSpec

MAX_MESSAGE_BYTES = 2**26
"""Maximum size of a message of a server, in bytes."""

MOST_VALUES = 1_000_000
"""Maximum number of commas and opening brackets in one message. Parsing more values would block the event loop."""

BETWEEN_STREAMS_S = 0.1
"""Minimum seconds between two requests for a stream of events, regardless of the server's wish."""

_MARK = "agentfly"
_SESSION = "mcp-session-id"
_KEPT_HEADERS = ("content-type", _SESSION)
_NO_SESSION = re.compile(
    r"session", re.IGNORECASE
)  # with status 400, the way in which servers report an unknown session id
_NOT_OF_THE_CALL = frozenset({401, 403, 407, 408, 421, 429})
_UNREACHABLE = frozenset({502, 503, 504})
_SHOWN = 200  # characters of a server's error text that are shown


class TransportFailure(StrEnum):
    """The reason why an HTTP request has no answer."""

    SESSION_LOST = "session lost"  # the server has forgotten the session
    UNREACHABLE = "unreachable"  # no server is reachable at present
    FAILED = "failed"  # this call alone failed


def transport_failure_of(error: Exception) -> TransportFailure | None:
    """Return the transport failure behind an error; None if the server or the package raised it."""
    data = error.data if isinstance(error, MCPError) else None
    return (
        TransportFailure(data[_MARK])
        if isinstance(data, Mapping) and data.get(_MARK) in list(TransportFailure)
        else None
    )


class MCPHTTPClient(httpx2.AsyncClient):
    """The HTTP client of one session.

    Before the first answer, failed connections raise, so that the start fails with their errors.

    Args:
        credentials: sent in the headers, and removed from messages.
        timeout: maximum duration of a connection attempt, and of one read.
    """

    def __init__(self, credentials: Credentials, timeout: httpx2.Timeout) -> None:
        super().__init__(
            headers={"accept-encoding": "identity"},
            timeout=timeout,
            event_hooks={"response": [self._bound]},
        )
        self._credentials = credentials
        self._has_answered = False
        self._next_stream_at = 0.0

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Return the response to a request, or a response that describes the failure.

        The credentials are on the request while it is sent, because responses and errors keep it.
        """
        secret = self._credentials.headers()
        request.headers.update(secret)
        try:
            return await self._answer(request, **options)
        finally:
            for name in secret:
                del request.headers[name]

    async def _answer(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        asked = _http_message(request)
        if request.method == "GET":
            await self._pause()
        if asked is None:
            return await super().send(request, **options)
        try:
            response = await super().send(request, **options)
            if response.has_redirect_location:  # otherwise the package would read its body
                await response.aread()
            return await self._checked(request, asked, response) if "id" in asked else response
        except httpx2.RequestError as error:
            if not self._has_answered:
                raise
            if "id" not in asked:  # a notification has no answer
                return httpx2.Response(202, request=request)
            gone = isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout))
            trouble = TransportFailure.UNREACHABLE if gone else TransportFailure.FAILED
            return self._failure(request, asked, trouble, f"{type(error).__name__}: {error}")

    async def _bound(self, response: httpx2.Response) -> None:
        """See that a response costs a bounded amount of memory and of the event loop's time, and shows no credential.

        Raises:
            DecodingError: it is compressed although no compression was requested: a few hundred bytes may become
                gigabytes.
        """
        redact = self._credentials.redact_bytes
        response.headers = httpx2.Headers([(name, redact(value)) for name, value in response.headers.raw])
        coding = response.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            raise httpx2.DecodingError(f"it answered in the coding {coding[:_SHOWN]!r}, and none was asked for")
        response.encoding = "utf-8"  # for JSON and events; others take long to decode
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        response.stream = _Body(response.stream, kind == "text/event-stream", self._credentials)

    async def _pause(self) -> None:
        """Wait before an event stream is opened again. A server may otherwise request that in an endless loop."""
        now = time.monotonic()
        at = max(now, self._next_stream_at)
        self._next_stream_at = at + BETWEEN_STREAMS_S
        await asyncio.sleep(at - now)

    async def _checked(
        self, request: httpx2.Request, asked: Mapping[str, Any], response: httpx2.Response
    ) -> httpx2.Response:
        status, kind = response.status_code, response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if status == 202 or 300 <= status < 400:
            return response
        if status < 400 and kind == "text/event-stream":
            self._has_answered = True
            return response
        try:
            body = await response.aread()
        finally:
            await response.aclose()
        if status < 400 and kind == "application/json":
            self._has_answered = True
            return _buffered(request, response, body)
        if status < 400:
            said = f"it answered with {kind or 'something'} instead of JSON"
            return self._failure(request, asked, TransportFailure.FAILED, said, body)
        if _SESSION in request.headers and (status == 404 or (status == 400 and _is_about_sessions(body))):
            return self._failure(
                request, asked, TransportFailure.SESSION_LOST, "it does not know the session any more", body
            )
        if status < 500 and status not in _NOT_OF_THE_CALL and _is_error(body):
            return _buffered(request, response, body)
        trouble = TransportFailure.UNREACHABLE if status in _UNREACHABLE else TransportFailure.FAILED
        return self._failure(request, asked, trouble, f"HTTP status {status}{_phrase(status)}", body)

    def _failure(
        self, request: httpx2.Request, asked: Mapping[str, Any], trouble: TransportFailure, said: str, body: bytes = b""
    ) -> httpx2.Response:
        told = " ".join(body[: 8 * _SHOWN].decode(errors="replace").split())
        told = self._credentials.redact(f"{said}: {told[:_SHOWN]}" if told else said)
        error = {"code": INTERNAL_ERROR, "message": told, "data": {_MARK: trouble.value}}
        return httpx2.Response(200, json={"jsonrpc": "2.0", "id": asked["id"], "error": error}, request=request)


def _http_message(request: httpx2.Request) -> Mapping[str, Any] | None:
    """The message that a request carries; None if it carries none."""
    if request.method != "POST":
        return None
    message = json.loads(request.content)
    return message if isinstance(message, dict) and "method" in message else None


_ENDS_OF_EVENTS = (b"\n\n", b"\r\r", b"\r\n\r\n")


def _values(part: bytes) -> int:
    """Return an upper bound of the number of JSON values in a part of a message."""
    return sum(part.count(mark) for mark in (b",", b"[", b"{"))


class _Body(httpx2.AsyncByteStream):
    """A body without the credentials that were sent for it, which fails once a message is longer than it may be.

    Args:
        stream: the body as it comes.
        of_events: whether it is a stream of events, each a message, or one message.
        credentials: the secrets to remove.
    """

    def __init__(self, stream: Any, of_events: bool, credentials: Credentials) -> None:
        self._stream = stream
        self._of_events = of_events
        self._credentials = credentials

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, values, rest = 0, 0, b""
        async for part in self._stream:
            last = part
            if self._of_events and (end := max(part.rfind(mark) for mark in _ENDS_OF_EVENTS)) >= 0:
                size, values, last = 0, 0, part[end:]
            size += len(last)
            values += _values(last)
            if size > MAX_MESSAGE_BYTES:
                raise self._failure(f"it answered with more than {MAX_MESSAGE_BYTES} bytes")
            if values > MOST_VALUES:
                raise self._failure(f"it answered with more than {MOST_VALUES:,} commas and brackets in a message")
            found = self._credentials.redact_bytes(rest + part)
            end = len(found) - self._credentials.unfinished(found)
            rest = found[end:]
            if end:
                yield found[:end]
        if rest:
            yield rest

    def _failure(self, said: str) -> Exception:
        return httpx2.SSEError(said) if self._of_events else httpx2.ReadError(said)

    async def aclose(self) -> None:
        await self._stream.aclose()


def _buffered(request: httpx2.Request, response: httpx2.Response, body: bytes) -> httpx2.Response:
    headers = {name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers}
    return httpx2.Response(response.status_code, headers=headers, content=body, request=request)


def _error_in(body: bytes) -> Mapping[str, Any] | None:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return None
    error = message.get("error") if isinstance(message, dict) else None
    return error if isinstance(error, dict) and isinstance(error.get("code"), int) else None


def _is_error(body: bytes) -> bool:
    """Whether a body is an error of the protocol."""
    return _error_in(body) is not None


def _is_about_sessions(body: bytes) -> bool:
    error = _error_in(body)
    if error is None:
        return _NO_SESSION.search(body[: 8 * _SHOWN].decode(errors="replace")) is not None
    return error["code"] not in (INVALID_PARAMS, METHOD_NOT_FOUND) and bool(_NO_SESSION.search(str(error)))


def _phrase(status: int) -> str:
    try:
        return f" ({HTTPStatus(status).phrase})"
    except ValueError:
        return ""


CONNECT_S = 30.0
"""Time limit for connecting to an address, in seconds."""

READ_S = 30.0
"""Seconds beyond the time limit of a call after which a silent connection is closed. Calls end before that."""

Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
Outgoing = MemoryObjectSendStream[SessionMessage]


@contextlib.asynccontextmanager
async def stdio_transport(
    spec: MCPServerSpec, program: SupervisedProgram, directory: Path, faults: list[str]
) -> AsyncIterator[tuple[Incoming, Outgoing]]:
    """Start a program, and communicate over its standard input and output, one message per line.

    The program's input ends with the block, so that it exits.

    Args:
        spec: the server.
        program: supervises the program.
        directory: its private directory.
        faults: receives faults of the program after which no message can be read.
    """
    near, far = socket.socketpair()
    with far:
        reader, writer = await asyncio.open_connection(sock=near, limit=MAX_MESSAGE_BYTES)
        try:
            await program.start(_job(spec, directory, far.fileno()))
        except BaseException:
            writer.close()
            raise
    from_program, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, to_program = anyio.create_memory_object_stream[SessionMessage](0)
    try:
        async with from_program, incoming, outgoing, to_program, anyio.create_task_group() as group:
            group.start_soon(_read, reader, from_program, faults)
            group.start_soon(_write, writer, to_program)
            try:
                yield incoming, outgoing
            finally:
                group.cancel_scope.cancel()
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def http_transport(spec: MCPServerSpec) -> AsyncIterator[tuple[object, object]]:
    """Speak with a server at an address, over streamable HTTP.

    Raises:
        PrerequisiteError: an environment variable with a credential is not set.
    """
    credentials = Credentials.from_environment(spec.api_key_env, dict(spec.headers_env).items())
    timeout = httpx2.Timeout(CONNECT_S, read=spec.call_timeout_s + READ_S)
    with credentials.out_of_logs():
        async with (
            MCPHTTPClient(credentials, timeout) as client,
            streamable_http_client(spec.url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
        ):
            yield streams


def log_file(directory: Path) -> Path:
    """Return the path of a program's log."""
    return directory / "log"


def _job(spec: MCPServerSpec, directory: Path, descriptor: int) -> ProgramSpec:
    variables = dict(spec.env)
    return ProgramSpec(
        command=spec.command,
        env={**get_default_environment(), **variables},
        directory=str(directory),
        log=str(log_file(directory)),
        max_log_bytes=parse_byte_size(spec.max_log_bytes),
        secrets=[value for value in variables.values() if len(value) >= 8],
        cwd=spec.cwd,
        stdin=descriptor,
        stdout=descriptor,
    )


async def _read(
    reader: asyncio.StreamReader, found: MemoryObjectSendStream[SessionMessage | Exception], faults: list[str]
) -> None:
    async with found:
        try:
            while line := await reader.readline():
                if line.strip():
                    await found.send(_message(line))
        except ConnectionError:  # it has ended
            pass
        except ValueError:
            faults.append(f"it sent a line of more than {MAX_MESSAGE_BYTES} bytes")


def _message(line: bytes) -> SessionMessage | Exception:
    """Parse a line. A malformed answer to a request becomes an error of that request."""
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        answered = _answered(line)
        if answered is None:  # the session logs it: some programs print to stdout by mistake
            return error
        failure = ErrorData(code=PARSE_ERROR, message=f"its answer is no message of the protocol: {error}")
        return SessionMessage(JSONRPCError(jsonrpc="2.0", id=answered, error=failure))


def _answered(line: bytes) -> int | str | None:
    """Return the id of the request that a line answers; None if it answers none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not message.keys() & {"result", "error"}:
        return None
    number = message.get("id")
    return number if isinstance(number, (int, str)) and not isinstance(number, bool) else None


async def _write(writer: asyncio.StreamWriter, given: MemoryObjectReceiveStream[SessionMessage]) -> None:
    async with given:
        with contextlib.suppress(ConnectionError):  # it has ended; the end of its output reports this
            async for one in given:
                writer.write(one.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await writer.drain()
