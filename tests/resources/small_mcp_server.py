"""A server of the Model Context Protocol in the standard library alone, which starts at once: the protocol of 2025.

Its tools write down a line and read all of them, wait, leave a process behind, and end the server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

lines: list[str] = []


def call(tool: str, given: dict[str, Any]) -> str:
    match tool:
        case "write":
            lines.append(given["line"])
            return f"line {len(lines)}"
        case "read":
            return json.dumps(lines)
        case "wait":
            time.sleep(given["seconds"])
            return "waited"
        case "leave":
            left = subprocess.Popen(["sleep", "600"], start_new_session=True, cwd="/", stdout=subprocess.DEVNULL)
            return str(left.pid)
        case "end":
            print("out of paper", file=sys.stderr, flush=True)
            os._exit(3)
    raise KeyError(tool)


def tool(name: str, **arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": kind} for argument, kind in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"name": name, "description": f"Does {name}.", "inputSchema": schema}


TOOLS = [tool("write", line="string"), tool("read"), tool("wait", seconds="number"), tool("leave"), tool("end")]


def result(method: str, given: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        told = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
        return {**told, "serverInfo": {"name": "small", "version": "1"}}
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        text = call(given["name"], given["arguments"])
        return {"content": [{"type": "text", "text": text}], "isError": False}
    if method == "ping":
        return {}
    raise KeyError(method)


def answer(request: dict[str, Any]) -> None:
    try:
        said: dict[str, Any] = {"result": result(request["method"], request.get("params") or {})}
    except KeyError as error:
        said = {"error": {"code": -32601, "message": f"there is no {error}"}}
    print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **said}), flush=True)


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("method") == "tools/call":
            threading.Thread(target=answer, args=(request,), daemon=True).start()
        elif "id" in request:
            answer(request)
