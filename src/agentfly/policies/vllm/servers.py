"""Servers of a policy: how each is obtained and recovered, and which settings go together."""

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

_MOST_ALIKE = 8


class PolicyServer(ABC):
    """One server of a policy.

    Attributes:
        name: what messages call it.
        usable: whether it can be used: it answers, and holds the policy's weights.
        context_length: the most tokens that it holds; known once it is connected.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.usable = False
        self.context_length = 0
        self._server: TokenServer | None = None

    @property
    def server(self) -> TokenServer:
        """What is asked.

        Raises:
            PolicyError: it is not connected.
        """
        if self._server is None:
            raise PolicyError(f"{self.name} is not connected. Use the policy inside `async with policy:`.")
        return self._server

    async def connect(self) -> None:
        """Have the server, anew if it is gone, and see that it can do what is asked of it.

        Raises:
            PrerequisiteError: it lacks something that vLLM has; the message says what to start it with.
            ConfigError: its log-probs are not those that it samples from.
            ResourceError: it cannot be had, or does not answer.
        """
        if self._server is None or not await self._server.is_well():
            self._server = None
            self._server = await self._have()
        server = self._server
        self.context_length = (await server.served_model()).context_length
        try:
            await server.resume()  # it may have been left paused by a policy that was killed
        except APIRefused as error:
            raise PrerequisiteError(f"{self.name} {_NO_CONTROL} ({error}).") from error
        try:
            # Cut to the most likely token, whatever is sampled has all probability, unless the cut is left out of it.
            sample = await server.sample([1, 2, 3], max_tokens=8, top_k=1)
        except (APIRefused, APIMalformed) as error:
            raise PrerequisiteError(f"{self.name} {_NO_TOKEN_IDS} ({error}).") from error
        if not all(map(_is_of_the_likeliest, sample.logprobs)):
            raise ConfigError(f"{self.name} {_RAW_LOGPROBS}.")

    @abstractmethod
    async def _have(self) -> TokenServer: ...

    @abstractmethod
    async def close(self) -> None:
        """Give the server back."""


def _is_of_the_likeliest(logprob: float) -> bool:
    """Whether a log-prob is 0, or that of one of a few tokens alike, all of which a cut to the likeliest keeps.

    In half precision the two or three likeliest logits are often the same number.
    """
    return any(abs(logprob + math.log(alike)) < 1e-3 for alike in range(1, _MOST_ALIKE + 1))


class LeasedPolicyServer(PolicyServer):
    """A server that an engine starts, for this policy alone: whoever shared it would get the policy's weights."""

    def __init__(self, name: str, spec: ModelServerSpec, engine: ResourceEngine) -> None:
        super().__init__(name)
        self._spec = spec
        self._engine = engine
        self._lease: Lease[ModelServer] | None = None

    async def _have(self) -> TokenServer:
        await self.close()
        self._lease = await self._engine.acquire(self._spec, owner=self.name)
        return self._lease.resource

    async def close(self) -> None:
        """Give the server back to the engine, where it waits for whoever asks next, with its own weights."""
        self._server, lease, self._lease = None, self._lease, None
        if lease is not None:
            await self._engine.release(lease)


class RemotePolicyServer(PolicyServer):
    """A server that is there already, at an address."""

    def __init__(self, url: str, api_key_env: str | None, call_timeout_s: float) -> None:
        super().__init__(f"The server at {url}")
        self._url = url
        self._api_key_env = api_key_env
        self._call_timeout_s = call_timeout_s
        self._client: RemoteTokenServer | None = None

    async def _have(self) -> TokenServer:
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
    """See that the settings of a `VLLMPolicy` go together.

    Raises:
        ConfigError: they do not.
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
        raise ConfigError(
            "VLLMPolicy needs a ModelServerSpec of servers to start, or urls of running ones: one of both."
        )
    if urls and (model is None or servers != 1):
        raise ConfigError("VLLMPolicy(urls=…) needs model=…, for the tokenizer, and no number of servers.")
    if len(set(urls)) < len(urls):
        raise ConfigError("VLLMPolicy(urls=…) has an address twice.")
    require_whole("VLLMPolicy", servers=servers)
    if spec is not None and spec.data_parallel > 1:
        raise ConfigError(
            "VLLMPolicy shares rollouts out among servers itself, so that each stays with its cache, and proves every "
            "one of them: leave out data_parallel, and give servers=… instead."
        )
    if in_flight not in ("wait", "keep"):
        raise ConfigError(f"VLLMPolicy(in_flight={in_flight!r}): write 'wait' or 'keep'.")
    if raw_logprobs and spec is not None and spec.adapters:
        raise ConfigError("raw_logprobs=True: vLLM cannot score tokens on servers with adapters. Leave out one.")


def resolve_spec(spec: ModelServerSpec, model: Path, servers: int) -> ModelServerSpec:
    """A spec with room for so many servers, whose model is the directory that the tokenizer is from."""
    name = spec.served_model_name or spec.model
    return replace(spec, model=str(model), served_model_name=name, capacity=max(spec.capacity, servers))
