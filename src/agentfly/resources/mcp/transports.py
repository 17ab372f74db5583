"""Transports: how the messages of a session get to a server and back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import PARSE_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

from agentfly.resources.byte_size import parse_bytes
from agentfly.resources.credentials import Credentials
from agentfly.resources.keeping.keeper import Job
from agentfly.resources.keeping.kept_program import KeptProgram
from agentfly.resources.mcp.http_client import LONGEST_MESSAGE, HTTPClient
from agentfly.resources.mcp.spec import MCPServerSpec

CONNECT_S = 30.0
"""Seconds that a connection to an address may take to be made."""

READ_S = 30.0
"""Seconds beyond the time of a call after which a connection that brings nothing is given up. Calls end before."""

Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
Outgoing = MemoryObjectSendStream[SessionMessage]


@contextlib.asynccontextmanager
async def of_program(
    spec: MCPServerSpec, program: KeptProgram, directory: Path, faults: list[str]
) -> AsyncIterator[tuple[Incoming, Outgoing]]:
    """Start a program and speak with it over its standard input and output, a message a line.

    With the block its input ends, which tells it to end.

    Args:
        spec: the server.
        program: what is to keep it.
        directory: the directory that is its alone.
        faults: gets what the program has done that no message can be read behind.
    """
    near, far = socket.socketpair()
    with far:
        reader, writer = await asyncio.open_connection(sock=near, limit=LONGEST_MESSAGE)
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
async def of_address(spec: MCPServerSpec) -> AsyncIterator[tuple[object, object]]:
    """Speak with a server at an address, over streamable HTTP.

    Raises:
        PrerequisiteError: an environment variable with a credential is not set.
    """
    credentials = Credentials.from_environment(spec.api_key_env, dict(spec.headers_env).items())
    timeout = httpx2.Timeout(CONNECT_S, read=spec.call_timeout_s + READ_S)
    with credentials.out_of_logs():
        async with (
            HTTPClient(credentials, timeout) as client,
            streamable_http_client(spec.url, http_client=client, max_sse_event_size=LONGEST_MESSAGE) as streams,
        ):
            yield streams


def log_file(directory: Path) -> Path:
    """Where a program has its log."""
    return directory / "log"


def _job(spec: MCPServerSpec, directory: Path, descriptor: int) -> Job:
    variables = dict(spec.env)
    return Job(
        command=spec.command,
        env={**get_default_environment(), **variables},
        directory=str(directory),
        log=str(log_file(directory)),
        log_bytes=parse_bytes(spec.log_bytes),
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
            faults.append(f"it sent a line of more than {LONGEST_MESSAGE} bytes")


def _message(line: bytes) -> SessionMessage | Exception:
    """The message of a line. One that answers a request, but not as the protocol wants it, becomes an error of it."""
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        answered = _answered(line)
        if answered is None:  # the session tells it in its log: some programs print where they should not
            return error
        failure = ErrorData(code=PARSE_ERROR, message=f"its answer is no message of the protocol: {error}")
        return SessionMessage(JSONRPCError(jsonrpc="2.0", id=answered, error=failure))


def _answered(line: bytes) -> int | str | None:
    """The id of the request that a line answers; None if it answers none."""
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
        with contextlib.suppress(ConnectionError):  # it has ended, which its output tells
            async for one in given:
                writer.write(one.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await writer.drain()
