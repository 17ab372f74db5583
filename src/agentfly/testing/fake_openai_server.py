"""An HTTP server of an OpenAI-compatible API that fails on request in every way that such a server can.

::

    async with FakeOpenAIServer() as server:
        server.script += [error_reply(429, retry_after="1"), stalls_in_body, text_reply("hello")]
        spec = ModelAPISpec(base_url=server.url, model="m")
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class ReceivedRequest:
    """A request as it arrived. ``at`` is in seconds of the monotonic clock."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    at: float = field(default_factory=time.monotonic)


ServerReply = Callable[[ReceivedRequest, asyncio.StreamWriter], Awaitable[None]]


class FakeOpenAIServer:
    """The server, as an async context manager.

    Each request takes the next reply of ``script``, or ``default_reply`` when none is left. It can be entered again
    after it was left, and then has the same port.

    Attributes:
        requests: all requests so far.
        open: number of requests in progress.
        max_open: the maximum of ``open`` so far.
    """

    def __init__(self) -> None:
        self.script: deque[ServerReply] = deque()
        self.default_reply: ServerReply = text_reply("hello")
        self.requests: list[ReceivedRequest] = []
        self.open = 0
        self.max_open = 0
        self.url = ""
        self._port = 0
        self._changed = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds of the server."""
        async with asyncio.timeout(20):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            while (request := await _read(reader)) is not None:
                await self._answer(request, reader, writer)
                if writer.is_closing():
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return
        finally:
            self._connections.discard(connection)
            writer.close()

    async def _answer(
        self, request: ReceivedRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.requests.append(request)
        self.open += 1
        self.max_open = max(self.max_open, self.open)
        self._changed.set()
        answer = self.script.popleft() if self.script else self.default_reply
        answering = asyncio.ensure_future(answer(request, writer))
        hung_up = asyncio.ensure_future(reader.read(1))  # before the answer a client sends nothing, except end-of-file
        try:
            await asyncio.wait({answering, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            if hung_up.done():
                writer.close()
        finally:
            for task in (answering, hung_up):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await task
            self.open -= 1
            self._changed.set()


async def _read(reader: asyncio.StreamReader) -> ReceivedRequest | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return ReceivedRequest(method, path, headers, json.loads(body) if body else None)


# --- replies -------------------------------------------------------------------------------------------------------


def head(status: int, length: int | None, headers: dict[str, str] | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status} Status", "Content-Type: application/json"]
    lines += [] if length is None else [f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def raw_reply(status: int, body: Any = b"", **headers: str) -> ServerReply:
    """Answer with a status, a body (bytes, or a value to send as JSON) and headers."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    async def answer(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(head(status, len(data), named) + data)
        await writer.drain()

    return answer


def chat_completion(text: str | None, usage: tuple[int, int] | None = (3, 2), **message: Any) -> dict[str, Any]:
    """The JSON of a chat completion."""
    completion: dict[str, Any] = {
        "id": "c",
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": "stop"}
        ],
    }
    if usage is not None:
        completion["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    return completion


def text_reply(text: str, usage: tuple[int, int] | None = (3, 2)) -> ServerReply:
    """Answer a chat with a text."""
    return raw_reply(200, chat_completion(text, usage))


def error_reply(status: int, message: str = "it is not to be", **headers: str) -> ServerReply:
    """Answer with an error in the format of OpenAI."""
    return raw_reply(status, {"error": {"message": message, "type": "t", "code": None}}, **headers)


def delayed_reply(gate: asyncio.Event, answer: ServerReply) -> ServerReply:
    """Answer once ``gate`` is set."""

    async def wait(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        await answer(request, writer)

    return wait


async def never_replies(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """Never answer, and keep the connection."""
    await asyncio.Event().wait()


async def stalls_in_body(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(head(200, 1000) + b'{"choices": [')
    await asyncio.Event().wait()


async def trickles_bytes(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """Send a byte now and then, for ever."""
    writer.write(head(200, 10**6))
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def closes_connection(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """Close the connection without a word."""
    writer.close()


async def closes_in_body(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """Close the connection within the body, which is shorter than its Content-Length."""
    writer.write(head(200, 1000) + b'{"choices": [')
    await writer.drain()
    writer.close()


async def resets_connection(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """Reset the connection within the body."""
    writer.write(head(200, 1000) + b'{"choices": [')
    await writer.drain()
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def short_content_length(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """A Content-Length that cuts the JSON, and the rest on the heels of it."""
    data = json.dumps(chat_completion("hello")).encode()
    writer.write(head(200, len(data) - 20) + data)
    await writer.drain()
    writer.close()


async def not_http(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
    await writer.drain()
    writer.close()


async def echoes_credentials(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """Answer with an error that repeats the request's headers, in the body and in a header."""
    body = json.dumps({"error": {"message": f"who is {request.headers}?"}}).encode()
    seen = {"X-Seen": request.headers.get("authorization", ""), "X-Also": request.headers.get("x-org", "")}
    writer.write(head(401, len(body), seen) + body)
    await writer.drain()


async def echoes_credentials_as_an_answer(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """Answer 200 with the request's headers instead of a completion."""
    await raw_reply(200, {"headers": request.headers})(request, writer)
