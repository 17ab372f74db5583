"""A server of the Model Context Protocol, made with the official package: notes, kept in memory. Run as a program."""

from __future__ import annotations

import asyncio
import base64
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, ImageContent, TextContent

server = MCPServer("notes")
lines: list[str] = []
PIXEL = base64.b64encode(b"\x89PNG a pixel").decode()


@server.tool()
def write(line: str, times: int = 1, tags: list[str] | None = None) -> str:
    """Write a line.

    Args:
        line: the line.
        times: how often.
    """
    lines.extend([line] * times)
    return f"{len(lines)} {tags}"


@server.tool()
def read() -> list[str]:
    """Read all lines."""
    return lines


@server.tool()
def show(kind: Literal["png", "both"]) -> CallToolResult:
    """Show an image."""
    image = ImageContent(type="image", data=PIXEL, mime_type="image/png")
    before = [TextContent(type="text", text="look:")] if kind == "both" else []
    return CallToolResult(content=[*before, image])


@server.tool()
def fail(how: str) -> str:
    """Fail."""
    raise ValueError(f"no such note: {how}")


@server.tool()
def variable(name: str) -> str:
    """Tell an environment variable."""
    return f"{os.environ.get(name)} in {Path.cwd()}"


@server.tool()
def secret() -> str:
    """Print a variable where the log is."""
    print(f"the secret is {os.environ['TOKEN']}", file=sys.stderr, flush=True)
    return "printed"


@server.tool()
def pid() -> int:
    """Tell the process id."""
    return os.getpid()


@server.tool()
def leave() -> int:
    """Leave a process behind, in a session of its own."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True, cwd="/", stdout=subprocess.DEVNULL).pid


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def block(seconds: float) -> str:
    """Wait, and do nothing else meanwhile."""
    time.sleep(seconds)
    return "blocked"


@server.tool()
def end(status: int) -> None:
    """End the server."""
    print("out of paper", file=sys.stderr, flush=True)
    os._exit(status)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
