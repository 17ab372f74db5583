"""ModelAPISpec and ModelAPI: a model served by others, its address, its limits, and calls of it."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentfly.core.errors import ResourceDied, UsageError
from agentfly.core.threads.pool import run_in_thread
from agentfly.resources.credentials import Credentials, normalize_credentials
from agentfly.resources.kind import ResourceKind
from agentfly.resources.model_api.client import ModelClient, load_certificates
from agentfly.resources.model_api.judge import Judge
from agentfly.resources.model_api.rate_limiter import EndpointUse, RateLimiter
from agentfly.resources.model_api.responses import ChatCompletion, TextCompletion
from agentfly.resources.model_api.retry import RetryingCaller, RetryPolicy
from agentfly.resources.model_api.shared_usage import HOST_USAGE
from agentfly.resources.model_api.usage_window import RateLimits
from agentfly.resources.model_api.validation import check_parameter_names, parse_base_url
from agentfly.resources.resource import Resource, Status
from agentfly.resources.spec import ResourceSpec

_PER_CALL_FIELDS = {"messages", "prompt", "model", "stream"}


SPEC_ONLY_FIELDS = {"call_timeout_s", "wait_timeout_s", "retries", "connect_timeout_s", "read_timeout_s", "extra_body"}
"""Fields of the spec that could be mistaken for parameters of a call."""


BYTES_PER_TOKEN = 3
"""A low estimate: current tokenizers have about four characters per token in English, and three in code."""

MESSAGE_TOKENS = 8
IMAGE_TOKENS = 1_500
DEFAULT_COMPLETION_TOKENS = 1_024
"""Estimated number of tokens of an answer without a limit."""


@dataclass(frozen=True, kw_only=True)
class ModelAPISpec(ResourceSpec["ModelAPI"]):
    """A model behind an OpenAI-compatible API: a judge, a simulated user, a teacher.

    The limits apply to all calls on this host to the same model at the same address with the same key together:
    all rollouts, all pools and engines, all processes.

    Args:
        base_url: the base of the endpoint, such as ``https://api.host/v1``.
        model: the model's name there.
        api_key_env: the environment variable that holds the key, sent as ``Authorization: Bearer …``; None for none.
            The key is read when the resource starts, and is shown nowhere.
        headers_env: further secret headers: a mapping, or pairs, of a header's name and the environment variable that
            holds its value.
        requests_per_minute: requests in any minute; None for no limit.
        tokens_per_minute: tokens of prompts and answers in any minute; None for no limit. A call reserves its
            prompt and ``max_tokens``, and returns what it did not use.
        max_concurrency: maximum number of concurrent calls; None for no limit. It is halved when the server asks for
            less, and grows again with the calls that go well. Any number of owners share one ``global`` instance.
        call_timeout_s: time limit of a call in seconds, from its first attempt, including retries.
        wait_timeout_s: seconds that a call may wait for its turn under the limits.
        retries: further tries of a call that failed in a way that may pass.
        connect_timeout_s: time limit for connecting, in seconds.
        read_timeout_s: seconds that may pass without a byte from the far side, which sends the first one when the
            whole answer is generated.
        extra_body: added to every request, such as ``{"temperature": 0}``; parameters of a call take precedence.

    Raises:
        ConfigError: a field has a value that cannot be, for instance an address that was never filled in.
    """

    kind = ResourceKind("api", "agentfly.resources.model_api.model_api:ModelAPI")

    base_url: str
    model: str
    api_key_env: str | None = None
    headers_env: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = 16
    call_timeout_s: float = 300.0
    wait_timeout_s: float = 600.0
    retries: int = 5
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 120.0
    extra_body: Mapping[str, Any] | str = "{}"
    capacity: int = 1024  # an instance is a few connections

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "base_url", parse_base_url(self.base_url))
        if not isinstance(self.model, str) or not self.model.strip():
            raise self._field_error("model", "write the name under which the endpoint serves the model")
        for name in ("requests_per_minute", "tokens_per_minute"):
            if getattr(self, name) is not None:
                self._require_int(name, least=1, otherwise=", or None for no limit")
        self._require_int("retries", least=0)
        for name in ("call_timeout_s", "wait_timeout_s", "connect_timeout_s", "read_timeout_s"):
            self._require_seconds(name)
        normalize_credentials(self)
        self._settle_extra_body()

    @property
    def label(self) -> str:
        """``api`` and the model's name."""
        return f"api:{self.model}"

    @property
    def max_owners(self) -> None:
        """No limit: any number of owners share one ``global`` instance, because only its calls are limited."""
        return

    @property
    def limits(self) -> RateLimits:
        """The limits on the use of the endpoint."""
        most = 10**9 if self.max_concurrency is None else self.max_concurrency
        return RateLimits(most, self.requests_per_minute, self.tokens_per_minute)

    @property
    def parameters(self) -> dict[str, Any]:
        """`extra_body` as a mapping."""
        parsed: dict[str, Any] = json.loads(str(self.extra_body))
        return parsed

    def _settle_extra_body(self) -> None:
        """Keep the extra body as JSON text, which can be hashed."""
        given = self.extra_body
        try:
            value = json.loads(given) if isinstance(given, str) else dict(given)
            text = json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise self._field_error(
                "extra_body", f"write a mapping of plain values, as in a JSON object ({error})"
            ) from None
        if not isinstance(value, dict) or (_PER_CALL_FIELDS | SPEC_ONLY_FIELDS) & value.keys():
            excluded = ", ".join(sorted(_PER_CALL_FIELDS | SPEC_ONLY_FIELDS))
            raise self._field_error("extra_body", f"write a mapping, without any of {excluded}")
        object.__setattr__(self, "extra_body", text)


class ModelAPI(Resource, Judge):
    """A model behind an API, called within its limits. Acquire it with ``scope="global"``: all rollouts share it.

    A call waits for its turn, is tried again when it fails in a way that may pass, and raises otherwise. All that it
    raises is infrastructure: the rollout is then unscored, or its tool call failed for no fault of the policy.
    """

    spec: ModelAPISpec

    def __init__(self, spec: ModelAPISpec, instance: str) -> None:
        super().__init__(spec, instance)
        self._client: ModelClient | None = None
        self._gate: RateLimiter | None = None
        self._caller: RetryingCaller | None = None

    async def chat(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> ChatCompletion:
        """Request an answer to a conversation.

        Args:
            messages: for instance ``[{"role": "user", "content": "…"}]``.
            parameters: any parameters of the endpoint: ``temperature``, ``max_tokens``, ``tools``, …

        Raises:
            APIUnavailable, APIRateLimited, APIMalformed: it failed, and so did the further tries; the deadline may
                have left no time for them.
            APIRefused: this call will never be answered; the message says what to do.
            AcquireTimeout: its turn under the limits did not come within ``wait_timeout_s``.
            UsageError: a parameter cannot be sent.
            ResourceDied: the resource was released.
        """
        client, caller = self._require_started()
        asked = self._call_parameters(parameters)
        tokens = estimate_tokens({"messages": messages, **asked})
        return await caller.call(lambda left: client.chat(messages, call_timeout_s=left, **asked), tokens)

    async def complete(self, prompt: str | Sequence[int], **parameters: Any) -> TextCompletion:
        """Continue a prompt, which is a text or token ids.

        Parameters and errors are those of `chat`. A vLLM server returns the sampled ids for ``return_token_ids=True``.
        """
        client, caller = self._require_started()
        asked = self._call_parameters(parameters)
        tokens = estimate_tokens({"prompt": prompt, **asked})
        return await caller.call(lambda left: client.complete(prompt, call_timeout_s=left, **asked), tokens)

    async def models(self) -> tuple[str, ...]:
        """Return the names of the endpoint's models.

        They are requested once, outside the limits. Errors as in `chat`.
        """
        return await self._require_started()[0].models()

    def use(self) -> EndpointUse:
        """Return the current use of the endpoint by all processes of this host.

        Raises:
            ResourceDied: the resource was released.
        """
        self._require_started()
        assert self._gate is not None
        return self._gate.usage()

    async def start(self) -> None:
        """Read the credentials. No request is made: it would cost money, and the endpoint may be down temporarily.

        Raises:
            PrerequisiteError: an environment variable is missing; the message names it.
        """
        spec = self.spec
        credentials = Credentials.from_environment(spec.api_key_env, dict(spec.headers_env).items())
        await run_in_thread(load_certificates)
        self._client = ModelClient(
            spec.base_url,
            model=spec.model,
            credentials=credentials,
            connect_timeout_s=spec.connect_timeout_s,
            read_timeout_s=spec.read_timeout_s,
        )
        account = await run_in_thread(HOST_USAGE.account, spec.base_url, spec.model, credentials)
        self._gate = RateLimiter(account, spec.limits, f"{spec.model} at {spec.base_url}")
        retries = RetryPolicy(spec.retries, spec.call_timeout_s, spec.wait_timeout_s)
        self._caller = RetryingCaller(self._gate, retries)

    async def reset(self) -> None:
        """Do nothing: calls leave no state behind, and cookies are not stored."""

    async def status(self) -> Status:
        """Return whether calls are possible. A failing server is no reason to replace the client."""
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

    def _call_parameters(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        if own := SPEC_ONLY_FIELDS & parameters.keys():
            raise UsageError(f"{min(own)} is no parameter of a call. Write ModelAPISpec({min(own)}=…).")
        check_parameter_names(
            parameters, " If the endpoint has it all the same, write it into ModelAPISpec(extra_body={…})."
        )
        return {**self.spec.parameters, **parameters}

    def _require_started(self) -> tuple[ModelClient, RetryingCaller]:
        if self._client is None or self._caller is None:
            raise ResourceDied(f"{self!r} ({self.instance}) cannot be called: it was released, or never started.")
        return self._client, self._caller


def estimate_tokens(body: Mapping[str, Any]) -> int:
    """Return an upper estimate of a request's tokens: its prompt, and the limit of each answer.

    Raises:
        UsageError: a number of tokens or answers is invalid, or the prompt has no end.
    """
    prompt = body.get("messages", body.get("prompt", ""))
    named = next((name for name in ("max_completion_tokens", "max_tokens") if body.get(name)), "")
    answers = _whole(body, "n", 1) * _whole(body, named, DEFAULT_COMPLETION_TOKENS)
    try:
        return _tokens_in(prompt) + _tokens_in(body.get("tools", "")) + answers
    except RecursionError:
        raise UsageError("The messages, the prompt or the tools of a call are nested too deeply to be sent.") from None


def _whole(body: Mapping[str, Any], name: str, otherwise: int) -> int:
    try:
        return max(0, operator.index(body.get(name) or otherwise))
    except TypeError:
        raise UsageError(f"{name}={body[name]!r}: write a whole number, without quotes.") from None


def _tokens_in(part: Any) -> int:
    if isinstance(part, str):
        return -(-len(part.encode("utf-8", errors="replace")) // BYTES_PER_TOKEN)
    if isinstance(part, Mapping):
        if "image" in str(part.get("type", "")):
            return IMAGE_TOKENS
        return MESSAGE_TOKENS + sum(_tokens_in(name) + _tokens_in(value) for name, value in part.items())
    if isinstance(part, Sequence) and not isinstance(part, bytes):
        return sum(map(_tokens_in, part))
    return 1  # a token id, a number
