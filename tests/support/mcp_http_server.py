"""A fake MCP server over HTTP whose answers the test determines, with the protocol of 2025."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

PAGE = b"<html><body>We will be back soon.</body></html>"


@dataclass(frozen=True)
class Answer:
    """What is sent in answer to a request."""

    body: bytes = b""
    status: int = 200
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, message: Any, **fields: Any) -> Self:
        """A message as JSON."""
        return cls(json.dumps(message).encode(), **fields)

    @classmethod
    def result(cls, number: Any, result: Any, **fields: Any) -> Self:
        """The result of a request."""
        return cls.of({"jsonrpc": "2.0", "id": number, "result": result}, **fields)

    @classmethod
    def error(cls, number: Any, code: Any, message: Any = "no", **fields: Any) -> Self:
        """An error that a request ended in."""
        return cls.of({"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}, **fields)


Call = Callable[[dict[str, Any]], Answer | None]


def told(number: Any, text: str) -> Answer:
    """The result of a tool that says a text."""
    return Answer.result(number, {"content": [{"type": "text", "text": text}]})


def says_its_arguments(request: dict[str, Any]) -> Answer:
    return told(request["id"], json.dumps(request["params"].get("arguments")))


class MCPHTTPServer:
    """Serves at `url` while it is entered.

    Attributes:
        on_call: answers calls of tools; None breaks the connection.
        on_list: answers requests for the list of tools.
        forgets: sessions that it knows nothing of any more.
        sessions: those that it has begun.
        lost: what it answers where it knows nothing of a session.
        starts: whether sessions can be begun.
    """

    def __init__(self, on_call: Call = says_its_arguments) -> None:
        self.on_call = on_call
        self.on_list: Call = self._one_page
        self.sessions: list[str] = []
        self.forgets: set[str] = set()
        self.lost = Answer(b"no such session", 404, "text/plain")
        self.starts = True
        self.calls: list[tuple[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/mcp"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self._server.close()

    def forget(self) -> None:
        """Forget all sessions, as a server does that is started again."""
        self.forgets.update(self.sessions)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while answer := await self._answered(reader):
                head = {"content-length": str(len(answer.body)), **answer.headers}
                if answer.kind:
                    head["content-type"] = answer.kind
                lines = [
                    f"HTTP/1.1 {answer.status} Said",
                    *(f"{name}: {value}" for name, value in head.items() if value),
                    "",
                    "",
                ]
                writer.write("\r\n".join(lines).encode() + answer.body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answered(self, reader: asyncio.StreamReader) -> Answer | None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if not head[0].startswith("POST"):
            return Answer(status=405)
        request = json.loads(body)
        session = headers.get("mcp-session-id", "")
        if session in self.forgets:
            return self.lost
        if "id" not in request:
            return Answer(status=202)
        match request["method"]:
            case "initialize" if self.starts:
                self.sessions.append(f"session-{len(self.sessions)}")
                about = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
                result = {**about, "serverInfo": {"name": "scripted", "version": "1"}}
                return Answer.result(request["id"], result, headers={"mcp-session-id": self.sessions[-1]})
            case "initialize":
                return Answer(PAGE, 503, "text/html")
            case "ping":
                return Answer.result(request["id"], {})
            case "tools/list":
                return self.on_list(request)
            case "tools/call":
                self.calls.append((session, request["params"].get("arguments")))
                return self.on_call(request)
        return Answer.error(request["id"], -32601, "there is no such method", status=400)

    def _one_page(self, request: dict[str, Any]) -> Answer:
        return Answer.result(request["id"], {"tools": [tool("say")]})


def tool(name: str) -> dict[str, Any]:
    """A tool that takes any arguments."""
    return {
        "name": name,
        "description": f"Does {name}.",
        "inputSchema": {"type": "object", "additionalProperties": True},
    }
