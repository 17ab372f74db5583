"""Gateway: the chat APIs that programs speak, in front of a policy, with the tokens of every rollout recorded."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import TracebackType
from typing import TYPE_CHECKING, Self, get_args

from agentfly.core.errors import ConfigError, PrerequisiteError
from agentfly.core.installation import install_command
from agentfly.core.numbers import is_whole, require_whole
from agentfly.core.trajectory import Trajectory
from agentfly.formats.chat.chat_format import History
from agentfly.formats.toolcalls.registry import tool_call_format as named_format
from agentfly.formats.toolcalls.tool_call_format import ToolCallFormat
from agentfly.gateway.auth import host_name, is_key, new_key
from agentfly.gateway.call_tree import ProgramAPI
from agentfly.gateway.chat_completions.api import ChatCompletionsAPI
from agentfly.gateway.limits import GatewayLimits
from agentfly.gateway.model_request import RolloutSampling
from agentfly.gateway.request_codec import RequestCodec
from agentfly.gateway.rollout_registry import RolloutRegistry
from agentfly.gateway.session import ThreadOffloader
from agentfly.policies.policy import Policy

if TYPE_CHECKING:
    from agentfly.gateway.http_server import GatewayHTTPServer

MAX_PORT = 65535


class Gateway(RolloutRegistry):
    """Serves a policy under OpenAI's chat API, so that an agent program of any kind can be rolled out unchanged.

    ::

        async with Gateway(policy) as gateway:
            endpoint = gateway.open("task-7.0")  # the program's base URL, and a key for this rollout only
            …  # run the program with `endpoint.environment`
            trajectory = gateway.finish("task-7.0", task=task, reward=1.0)

    Calls may run in parallel, also within a rollout. `agentfly.gateway.session.ProgramSession` describes how they
    become token sequences. A program can only make model calls in its own rollout: see `agentfly.gateway.auth`.

    Args:
        policy: samples the answers. The caller owns it, and enters and leaves it.
        host: the address to listen at. By default only this machine can connect; use ``0.0.0.0`` for others. The
            gateway uses plain HTTP, so anyone who can read the network traffic can read the keys.
        port: the port; 0 for any free one.
        key: the key that a harness in another process sends to open, read and finish rollouts; random by default.
        model: the name under which the model is listed. Programs may request any name.
        tool_call_format: how the model writes tool calls. By default it is the format that the model's chat template
            describes, or else JSON in tags.
        history: what to do if the model's chat template would now render past turns differently, such as without
            their reasoning. ``"keep"`` continues after the sampled tokens; ``"rewrite"`` begins a new sequence.
        sampling: default sampling of a rollout. If not given, it is temperature 1, and programs cannot change it.
        max_tokens: maximum number of tokens in an answer, even if a program asks for more; None for as many as the
            context holds.
        limits: limits of the programs; see `agentfly.gateway.limits.GatewayLimits`.
        public_host: the host in the URLs for programs, if they reach the gateway by another name than ``host``.
        allowed_hosts: further host names that requests may use for the gateway. Addresses and ``localhost`` are always
            allowed.
        on_finish: called with the trajectory of each finished rollout. An error that it raises is logged, and the
            trajectory is still returned. For rollouts finished over HTTP, it runs on a thread, one call at a time.

    Attributes:
        key: the harness's key.

    Raises:
        ConfigError: a setting is invalid.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
        model: str = "agentfly",
        tool_call_format: str | ToolCallFormat | None = None,
        history: History = "keep",
        sampling: RolloutSampling | None = None,
        max_tokens: int | None = None,
        limits: GatewayLimits | None = None,
        public_host: str | None = None,
        allowed_hosts: Collection[str] = (),
        on_finish: Callable[[Trajectory], None] | None = None,
    ) -> None:
        if not isinstance(policy, Policy):
            raise ConfigError(
                f"Gateway(policy={policy!r}): a gateway records token ids, so it needs a policy that takes and returns "
                "them: an embedded one, vLLM or a scripted one."
            )
        if max_tokens is not None:
            require_whole("Gateway", max_tokens=max_tokens)
        if not is_whole(port, 0) or port > MAX_PORT:
            raise ConfigError(f"Gateway(port={port!r:.100}): it must be a whole number from 0 to {MAX_PORT}.")
        for name, value, wanted in (
            ("host", host, str),
            ("model", model, str),
            ("public_host", public_host or "", str),
            ("sampling", sampling or RolloutSampling(), RolloutSampling),
            ("limits", limits or GatewayLimits(), GatewayLimits),
        ):
            if not isinstance(value, wanted):
                raise ConfigError(f"Gateway({name}={value!r:.100}): it must be of the type {wanted.__name__}.")
        if history not in get_args(History):
            raise ConfigError(f"Gateway(history={history!r:.100}): it must be 'keep' or 'rewrite'.")
        if on_finish is not None and not callable(on_finish):
            raise ConfigError(f"Gateway(on_finish={on_finish!r:.100}): it must be a function that takes a trajectory.")
        if key is not None and not (isinstance(key, str) and is_key(key)):
            raise ConfigError(
                "Gateway(key=…): a key is sent in a header, so it must be visible ASCII characters without blanks."
            )
        if isinstance(allowed_hosts, str):
            raise ConfigError(f"Gateway(allowed_hosts={allowed_hosts!r}): give a list of names.")
        super().__init__(
            policy, limits=limits or GatewayLimits(), sampling=sampling or RolloutSampling(), on_finish=on_finish
        )
        self.host, self.port = host, port
        self.key = key if key is not None else new_key()
        self.model = model
        self.allowed_hosts = {host_name(name) for name in (host, public_host, *allowed_hosts) if name}
        self._public_host = public_host
        self._calls = None if tool_call_format is None else named_format(tool_call_format)
        self._history: History = history
        self._max_tokens = max_tokens
        self._server: GatewayHTTPServer | None = None

    async def __aenter__(self) -> Self:
        """Check the model's chat format and start to listen.

        Raises:
            PrerequisiteError: aiohttp is not installed, or the gateway cannot listen at the address.
            ChatFormatError: the model's conversations cannot be continued turn by turn.
        """
        try:
            from agentfly.gateway.http_server import GatewayHTTPServer
        except ModuleNotFoundError as error:
            raise PrerequisiteError(
                f"The gateway needs {error.name}, which is not installed: {install_command('gateway')}"
            ) from error
        self._codec = RequestCodec.of(self.policy.tokenizer, self._calls, history=self._history)
        self._heavy = ThreadOffloader()
        apis: list[ProgramAPI] = [
            ChatCompletionsAPI(
                self.policy.tokenizer,
                context_length=self.policy.context_length,
                limits=self.limits,
                max_tokens=self._max_tokens,
            )
        ]
        server = GatewayHTTPServer(
            self, apis, host=self.host, port=self.port, key=self.key, model=self.model, known_hosts=self.allowed_hosts
        )
        try:
            self.port = await server.start()
        except OSError as error:
            await server.stop()
            raise PrerequisiteError(
                f"Cannot listen at {self.host}:{self.port}: {error.strerror or error}. Choose another port; 0 is any."
            ) from error
        host = self._public_host or {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._server = server
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        server, self._server, self._url = self._server, None, None
        self._close_sessions()
        if server is not None:
            await server.stop()
        self._codec = None
