"""ModelAPI: a live model API, and what a tool or reward calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentfly.errors import ResourceDied, UsageError
from agentfly.resources.apis.account import HOST
from agentfly.resources.apis.caller import Caller, Retries
from agentfly.resources.apis.client import ModelClient, make_ready
from agentfly.resources.apis.completion import ChatCompletion, Completion
from agentfly.resources.apis.gate import EndpointUse, Gate
from agentfly.resources.apis.judge import Judge
from agentfly.resources.apis.limits import estimate_tokens
from agentfly.resources.apis.parameters import require_spelled
from agentfly.resources.apis.spec import NOT_SENT, ModelAPISpec
from agentfly.resources.credentials import Credentials
from agentfly.resources.resource import Resource, Status
from agentfly.threads.pool import on_thread


class ModelAPI(Resource, Judge):
    """A model behind an API, called within its limits. Acquire it with ``scope="global"``: all rollouts share it.

    A call waits for its turn, is tried again when it fails in a way that may pass, and raises otherwise. All that it
    raises is infrastructure: the rollout is then unscored, or its tool call failed for no fault of the policy.
    """

    spec: ModelAPISpec

    def __init__(self, spec: ModelAPISpec, instance: str) -> None:
        super().__init__(spec, instance)
        self._client: ModelClient | None = None
        self._gate: Gate | None = None
        self._caller: Caller | None = None

    async def chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> ChatCompletion:
        """Have the model answer a conversation.

        Args:
            messages: as in ``[{"role": "user", "content": "…"}]``.
            parameters: anything that the endpoint takes: ``temperature``, ``max_tokens``, ``tools``, …

        Raises:
            APIUnavailable, APIRateLimited, APIMalformed: it failed, and so did the further tries; the deadline may
                have left no time for them.
            APIRefused: this call will never be answered; the message says what to do.
            AcquireTimeout: its turn under the limits did not come within ``wait_timeout_s``.
            UsageError: a parameter cannot be sent.
            ResourceDied: the resource was released.
        """
        client, caller = self._started()
        asked = self._asked(parameters)
        tokens = estimate_tokens({"messages": messages, **asked})
        return await caller.call(lambda left: client.chat(messages, call_timeout_s=left, **asked), tokens)

    async def complete(self, prompt: str | Sequence[int], **parameters: Any) -> Completion:
        """Have the model go on from a prompt, which is a text or token ids.

        Parameters and errors are those of `chat`. A vLLM server returns the sampled ids for ``return_token_ids=True``.
        """
        client, caller = self._started()
        asked = self._asked(parameters)
        tokens = estimate_tokens({"prompt": prompt, **asked})
        return await caller.call(lambda left: client.complete(prompt, call_timeout_s=left, **asked), tokens)

    async def models(self) -> tuple[str, ...]:
        """The names of the models that the endpoint serves, asked once and outside the limits. Errors as in `chat`."""
        return await self._started()[0].models()

    def use(self) -> EndpointUse:
        """How much the endpoint is used now, by everybody on this host together.

        Raises:
            ResourceDied: the resource was released.
        """
        self._started()
        assert self._gate is not None
        return self._gate.use()

    async def start(self) -> None:
        """Read the credentials. The endpoint is not asked: that costs money, and it may be down for a while only.

        Raises:
            PrerequisiteError: an environment variable is missing; the message names it.
        """
        spec = self.spec
        credentials = Credentials.from_environment(spec.api_key_env, dict(spec.headers_env).items())
        await on_thread(make_ready)
        self._client = ModelClient(
            spec.base_url,
            model=spec.model,
            credentials=credentials,
            connect_timeout_s=spec.connect_timeout_s,
            read_timeout_s=spec.read_timeout_s,
        )
        account = await on_thread(HOST.account, spec.base_url, spec.model, credentials)
        self._gate = Gate(account, spec.limits, f"{spec.model} at {spec.base_url}")
        retries = Retries(spec.retries, spec.call_timeout_s, spec.wait_timeout_s)
        self._caller = Caller(self._gate, retries)

    async def reset(self) -> None:
        """Nothing to do: calls leave nothing behind, and cookies are not kept."""

    async def status(self) -> Status:
        """Say whether it can be called. A far side that fails is no reason to replace what calls it."""
        return self.quick_status()

    def quick_status(self) -> Status:
        """The same, at once."""
        return Status.BROKEN if self._client is None else Status.HEALTHY

    async def release(self) -> None:
        """Close the connections. Calls that are under way fail."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def __repr__(self) -> str:
        return f"<{self.spec.model} at {self.spec.base_url}>"

    def _asked(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        if own := NOT_SENT & parameters.keys():
            raise UsageError(f"{min(own)} is no parameter of a call. Write ModelAPISpec({min(own)}=…).")
        require_spelled(parameters, " If the endpoint has it all the same, write it into ModelAPISpec(extra_body={…}).")
        return {**self.spec.parameters, **parameters}

    def _started(self) -> tuple[ModelClient, Caller]:
        if self._client is None or self._caller is None:
            raise ResourceDied(f"{self!r} ({self.instance}) cannot be called: it was released, or never started.")
        return self._client, self._caller
