"""MCPServerSpec: a server of the Model Context Protocol, given by its command or its address."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from agentfly.core.errors import ConfigError
from agentfly.resources.credentials import normalize_credentials
from agentfly.resources.kind import ResourceKind
from agentfly.resources.model_api.validation import parse_address
from agentfly.resources.spec import EnvironmentVariables, ResourceSpec, normalize_env

if TYPE_CHECKING:
    from agentfly.resources.mcp.server import MCPServer  # noqa: F401  (named in the base class)


@dataclass(frozen=True, kw_only=True)
class MCPServerSpec(ResourceSpec["MCPServer"]):
    """A server of the Model Context Protocol, whose tools a model can call (see `agentfly.mcp_tools`).

    With a ``command``, an instance is a process that communicates over its standard input and output. A reset starts a
    new process. With a ``url``, an instance is a session with a running server, over streamable HTTP. A reset begins a
    new session; state that the server keeps across sessions remains.

    Args:
        command: the program and its arguments, one text each, such as ``("uvx", "mcp-server-git")``.
        url: the address of a server, such as ``https://host/mcp``. It is visible wherever the spec is, so credentials
            belong in ``api_key_env`` and ``headers_env``.
        env: environment variables of the program, as a mapping or as pairs. It inherits only variables that programs
            need to run: ``PATH``, ``HOME`` and the like. Values may be secrets; the spec's repr hides them.
        cwd: the directory that the program runs in; empty for a new, empty one.
        api_key_env: the environment variable that holds the key sent to ``url`` as ``Authorization: Bearer …``.
        headers_env: further secret headers: a mapping, or pairs, of a header's name and the environment variable that
            holds its value.
        call_timeout_s: maximum number of seconds of one call before it counts as a failure of the server.
            ``mcp_tools(timeout_s=…)`` is the time after which the model gets the message that a tool took too long.
        tool_error_codes: those codes reserved by JSON-RPC (-32768 to -32000) with which the server reports that a call
            was wrong; the model then gets the message. Other reserved codes mean that the server itself failed. By
            default the codes for wrong arguments and for unknown names. Errors with other numbers, and results with
            ``isError``, always go to the model.
        max_log_bytes: number of bytes kept from the end of the program's standard error.

    Raises:
        ConfigError: a field has an invalid value, or not exactly one of ``command`` and ``url`` is given.
    """

    kind = ResourceKind(
        "mcp server", "agentfly.resources.mcp.server:MCPServer", reap="agentfly.resources.process.supervised:reap"
    )

    command: tuple[str, ...] = ()
    url: str = ""
    env: EnvironmentVariables = ()
    cwd: str = ""
    api_key_env: str | None = None
    headers_env: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    call_timeout_s: float = 300.0
    tool_error_codes: tuple[int, ...] = (-32602, -32601)
    max_log_bytes: int | str = 2**18
    check_interval_s: float | None = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_command()
        self._check_url()
        if bool(self.command) == bool(self.url):
            raise ConfigError(
                f"{type(self).__name__} needs a command or a url, and not both. Write command=('uvx', 'the-server') "
                "for a program to start, or url='https://host/mcp' for a server that is there."
            )
        for given, needs in (("env", "command"), ("cwd", "command"), ("api_key_env", "url"), ("headers_env", "url")):
            if getattr(self, given) and not getattr(self, needs):
                raise ConfigError(f"{type(self).__name__}({given}=…) is for a server that is given by its {needs}.")
        normalize_env(self)
        normalize_credentials(self)
        self._require_seconds("call_timeout_s")
        self._normalize_tuple("tool_error_codes")
        if not all(type(code) is int for code in self.tool_error_codes):
            raise self._field_error(
                "tool_error_codes", "write a tuple of whole numbers, such as (-32602, -32601, -32603)"
            )
        if self._require_size("max_log_bytes") < 4096:
            raise self._field_error("max_log_bytes", "the end of a log says too little below 4096 bytes")

    @property
    def start_weight(self) -> int:
        """4 for a program, because it loads libraries; 1 for an address."""
        return 4 if self.command else 1

    @property
    def label(self) -> str:
        """``mcp`` and the program's or host's name."""
        if self.url:
            return f"mcp:{urlsplit(self.url).netloc}"
        names = [PurePath(word).name[:40] for word in self.command if not word.startswith("-")]
        return f"mcp:{' '.join(' '.join(names[:2]).split())}"

    def _check_command(self) -> None:
        if isinstance(self.command, str):
            words = ", ".join(map(repr, shlex.split(self.command)))
            raise self._field_error("command", f"write a tuple with one text a word: ({words},)")
        self._normalize_tuple("command")
        if not all(isinstance(word, str) and "\0" not in word for word in self.command):
            raise self._field_error("command", "write a tuple of texts: numbers too are text there")
        self._require_str("cwd")

    def _check_url(self) -> None:
        self._require_str("url")
        if self.url:
            parts = parse_address(f"{type(self).__name__}: url", self.url, "'https://host/mcp'")
            object.__setattr__(self, "url", parts._replace(fragment="").geturl())
