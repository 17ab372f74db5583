"""Servers of a policy: how each is obtained and recovered, and checks of the policy's settings."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentfly.core.errors import APIMalformed, APIRefused, ConfigError, PolicyError, PrerequisiteError
from agentfly.core.numbers import require_whole
from agentfly.resources.credentials import Credentials
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.engine.lease import Lease
from agentfly.resources.model_api.client import ModelClient
from agentfly.resources.model_server.server import ModelServer
from agentfly.resources.model_server.spec import ModelServerSpec
from agentfly.resources.model_server.token_server import RemoteTokenServer, TokenServer

_NO_TOKEN_IDS = (
    "does not serve token ids (/inference/v1/generate). Start vLLM of version 0.32 or newer with: --enable-scale-out"
)
_NO_CONTROL = "cannot be told to change its weights. Start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
_RAW_LOGPROBS = (
    "returns log-probs of another distribution than it samples from, which cannot be trained on. Start vLLM with: "
    "--logprobs-mode processed_logprobs"
)

_MAX_EQUAL = 8


class PolicyServer(ABC):
    """One server of a policy.

    Attributes:
        name: its name in messages.
        usable: whether it answers and serves the policy's weights.
        context_length: its context length in tokens; known once it is connected.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.usable = False
        self.context_length = 0
        self._server: TokenServer | None = None

    @property
    def server(self) -> TokenServer:
        """The connected token server.

        Raises:
            PolicyError: it is not connected.
        """
        if self._server is None:
            raise PolicyError(f"{self.name} is not connected. Use the policy inside `async with policy:`.")
        return self._server

    async def connect(self) -> None:
        """Obtain the server, again if it is gone, and check that it has all required features.

        Raises:
            PrerequisiteError: a feature of vLLM is missing; the message says how to start the server.
            ConfigError: its log-probs are not of the distribution that it samples from.
            ResourceError: it cannot be obtained, or does not answer.
        """
        if self._server is None or not await self._server.is_well():
            self._server = None
            self._server = await self._obtain()
        server = self._server
        self.context_length = (await server.served_model()).context_length
        try:
            await server.resume()  # it may have been left paused by a policy that was killed
        except APIRefused as error:
            raise PrerequisiteError(f"{self.name} {_NO_CONTROL} ({error}).") from error
        try:
            # With top_k=1 the sampled token has probability 1, unless the log-prob leaves out the cut.
            sample = await server.sample([1, 2, 3], max_tokens=8, top_k=1)
        except (APIRefused, APIMalformed) as error:
            raise PrerequisiteError(f"{self.name} {_NO_TOKEN_IDS} ({error}).") from error
        if not all(map(_is_after_cut, sample.logprobs)):
            raise ConfigError(f"{self.name} {_RAW_LOGPROBS}.")

    @abstractmethod
    async def _obtain(self) -> TokenServer: ...

    @abstractmethod
    async def close(self) -> None:
        """Release the server."""


def _is_after_cut(logprob: float) -> bool:
    """Return whether a log-prob shows that a cut left one token, or a few that are equally likely.

    In half precision the two or three largest logits are often equal. A cut to the most likely token keeps them all.
    """
    return any(abs(logprob + math.log(equal)) < 1e-3 for equal in range(1, _MAX_EQUAL + 1))


class LeasedPolicyServer(PolicyServer):
    """A server that an engine starts for this policy alone, because the policy updates its weights."""

    def __init__(self, name: str, spec: ModelServerSpec, engine: ResourceEngine) -> None:
        super().__init__(name)
        self._spec = spec
        self._engine = engine
        self._lease: Lease[ModelServer] | None = None

    async def _obtain(self) -> TokenServer:
        await self.close()
        self._lease = await self._engine.acquire(self._spec, owner=self.name)
        return self._lease.resource

    async def close(self) -> None:
        """Release the server to the engine, which resets it to its own weights for the next owner."""
        self._server, lease, self._lease = None, self._lease, None
        if lease is not None:
            await self._engine.release(lease)


class RemotePolicyServer(PolicyServer):
    """A running server, given by its address."""

    def __init__(self, url: str, api_key_env: str | None, call_timeout_s: float) -> None:
        super().__init__(f"The server at {url}")
        self._url = url
        self._api_key_env = api_key_env
        self._call_timeout_s = call_timeout_s
        self._client: RemoteTokenServer | None = None

    async def _obtain(self) -> TokenServer:
        if self._client is None:
            credentials = Credentials.from_environment(self._api_key_env)
            client = ModelClient(self._url, credentials=credentials, read_timeout_s=self._call_timeout_s)
            self._client = RemoteTokenServer(client, call_timeout_s=self._call_timeout_s)
        return self._client

    async def close(self) -> None:
        """Close the connections."""
        self._server, client, self._client = None, self._client, None
        if client is not None:
            await client.close()


def check_settings(
    spec: ModelServerSpec | None,
    servers: int,
    urls: Sequence[str],
    model: str | Path | None,
    in_flight: str,
    raw_logprobs: bool,
) -> None:
    """Check the settings of a `VLLMPolicy`.

    Raises:
        ConfigError: a setting is invalid, or settings contradict each other.
    """
    if isinstance(spec, str | Path):
        name = str(spec)
        cure = (
            f"VLLMPolicy(urls=[{name!r}], model='…')"
            if name.startswith(("http://", "https://"))
            else f"VLLMPolicy(af.ModelServerSpec(model={name!r}, device='gpu'))"
        )
        raise ConfigError(f"VLLMPolicy({name!r}): it takes the spec of the servers to start. Write {cure}.")
    if spec is not None and not isinstance(spec, ModelServerSpec):
        raise ConfigError(f"VLLMPolicy({spec!r:.100}): it takes a ModelServerSpec: af.ModelServerSpec(model=…).")
    if isinstance(urls, str) or not isinstance(urls, Sequence):
        raise ConfigError(f"VLLMPolicy(urls={urls!r:.100}): write a list of addresses: ['http://host:8000/v1'].")
    if (spec is None) == (not urls):
        raise ConfigError("VLLMPolicy needs either a ModelServerSpec of servers to start, or urls of running servers.")
    if urls and (model is None or servers != 1):
        raise ConfigError("VLLMPolicy(urls=…) needs model=…, for the tokenizer, and no number of servers.")
    if len(set(urls)) < len(urls):
        raise ConfigError("VLLMPolicy(urls=…) has an address twice.")
    require_whole("VLLMPolicy", servers=servers)
    if spec is not None and spec.data_parallel > 1:
        raise ConfigError(
            "VLLMPolicy distributes rollouts over servers itself, so that each stays with its cache, and checks every "
            "server: leave out data_parallel, and give servers=… instead."
        )
    if in_flight not in ("wait", "keep"):
        raise ConfigError(f"VLLMPolicy(in_flight={in_flight!r}): write 'wait' or 'keep'.")
    if raw_logprobs and spec is not None and spec.adapters:
        raise ConfigError("raw_logprobs=True: vLLM cannot score tokens on servers with adapters. Leave out one.")


def resolve_spec(spec: ModelServerSpec, model: Path, servers: int) -> ModelServerSpec:
    """Return the spec with capacity for all servers, and with the directory of the tokenizer as its model."""
    name = spec.served_model_name or spec.model
    return replace(spec, model=str(model), served_model_name=name, capacity=max(spec.capacity, servers))
