"""OpenAIPolicy: a model behind any OpenAI-compatible endpoint, for evaluation and for collecting data."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeGuard

from agentfly.core.errors import (
    APIMalformed,
    APIRefused,
    ConfigError,
    ModelAPIError,
    PolicyError,
    PromptTooLong,
    TokenInvariantError,
    UsageError,
    suggest_name,
    type_of,
)
from agentfly.core.messages import Message, ToolCall, move_tool_images_to_user_messages
from agentfly.policies.policy import ChatGeneration, SamplingParams
from agentfly.resources.credentials import Credentials
from agentfly.resources.model_api.client import ModelClient
from agentfly.resources.model_api.model_api import ModelAPI, ModelAPISpec
from agentfly.resources.model_api.responses import ChatCompletion, FunctionCall, Json, read_json, read_models

_TOO_LONG = re.compile(
    r"context[ _](length|window|size)|maximum (model|input|context) length|prompt is too long|exceed_context|"
    r"input token count|max_model_len|must have less than \d+ tokens|max_new_tokens` must be",
    re.IGNORECASE,
)
"""Error texts for conversations that are too long: OpenAI, vLLM, SGLang, llama.cpp, TGI, Gemini, Mistral."""

_CUT = frozenset({"length", "max_tokens", "model_length", "content_filter"})
_ABORTED = frozenset({"abort", "error", "insufficient_system_resource"})

_LEAST, _ROUNDING = 1e9, 1e-3
"""No log-prob is below minus the first, nor above the second, by which rounding may lift one above 0."""

_SETTINGS = {"call_timeout_s": 1800.0, "read_timeout_s": 600.0, "max_concurrency": 256}
"""Defaults of a policy. The defaults of `ModelAPISpec` are for a judge, whose calls are shorter and fewer."""


class OpenAIPolicy:
    """A chat policy for any OpenAI-compatible endpoint: vLLM, llama.cpp, TGI, a provider's API.

    ``OpenAIPolicy("http://localhost:8000/v1")``, or with a spec: ``OpenAIPolicy(ModelAPISpec(…))``. The spec sets
    limits, retries and credentials. Trajectories can be trained on only if the endpoint reports the exact token ids and
    log-probs, as vLLM does, and samples at temperature 1 without cuts. Otherwise the distribution behind the reported
    log-probs is not known.

    Args:
        base_url: the base URL of the endpoint, or a complete spec.
        model: the model's name at the endpoint; None if it serves only one.
        token_ids: whether to request token ids, which some endpoints refuse; None requests them from vLLM only.
        omit: parameters to leave out because the endpoint refuses them, such as ``temperature``.
        send_reasoning: whether the reasoning of earlier turns is sent back, as some models require.
        settings: further fields of `ModelAPISpec`, such as ``api_key_env``.

    Raises:
        ConfigError: no endpoint is given, or a setting is unknown or invalid.
    """

    def __init__(
        self,
        base_url: str | ModelAPISpec | None = None,
        model: str | None = None,
        *,
        token_ids: bool | None = None,
        omit: Collection[str] = (),
        send_reasoning: bool = False,
        **settings: Any,
    ) -> None:
        if not isinstance(base_url, str | ModelAPISpec):
            found = "" if base_url is None else f", not {base_url!r:.100}"
            raise ConfigError(
                f"OpenAIPolicy needs the base of an endpoint{found}. Write OpenAIPolicy('http://localhost:8000/v1', "
                "'model'), or give a ModelAPISpec."
            )
        if isinstance(omit, str) or not isinstance(omit, Collection):
            raise ConfigError(f"OpenAIPolicy(omit={omit!r:.100}): write a list of parameters, such as ['temperature'].")
        if isinstance(base_url, ModelAPISpec) and (model is not None or settings):
            raise ConfigError(
                "OpenAIPolicy(spec) takes no model and no settings beside the spec; write them into the spec."
            )
        _require_fields(settings)
        # A placeholder for the name, until the endpoint reports it, so that the rest of the spec is checked now.
        self._spec = (
            base_url
            if isinstance(base_url, ModelAPISpec)
            else ModelAPISpec(base_url=base_url, model=model or "?", **{**_SETTINGS, **settings})
        )
        self._find_model = not isinstance(base_url, ModelAPISpec) and model is None
        self._token_ids = token_ids
        self._omit = frozenset(omit)
        self._send_reasoning = send_reasoning
        self._limit = "max_tokens"
        self._api: ModelAPI | None = None

    @property
    def model(self) -> str:
        """The model's name at the endpoint.

        Raises:
            UsageError: no name was given, and the policy is not entered yet, which asks the endpoint.
        """
        if self._find_model and self._api is None:
            raise UsageError("The endpoint is asked for its model when the policy is entered: async with policy: …")
        return self._spec.model

    @property
    def max_concurrent_generations(self) -> int | None:
        """Maximum number of concurrent calls, from the spec."""
        return self._spec.max_concurrency

    @property
    def in_use(self) -> bool:
        """Whether it has been entered and not left."""
        return self._api is not None

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        *,
        rollout_id: str,
    ) -> ChatGeneration:
        """Generate the answer to a conversation. Cancelling the call closes its connection.

        If the arguments of a tool call are not a JSON object, the call carries an error for the model. A turn that a
        limit cut has no tool calls.

        Raises:
            PromptTooLong: the endpoint reports that the conversation leaves no room for an answer.
            ModelAPIError: the call and its retries failed; see `ModelAPI.chat`.
            PolicyError: the endpoint aborted the generation.
            TokenInvariantError: the endpoint reports fewer ids than it sampled.
        """
        wire = list(_wire_messages(messages, send_reasoning=self._send_reasoning))
        parameters = self._parameters(tools, sampling)
        try:
            completion = await self._ask(wire, parameters)
        except PromptTooLong:
            # Perhaps only the prompt and the limit together are too long. Without a limit the answer takes the rest.
            if self._limit not in parameters:
                raise
            del parameters[self._limit]
            completion = await self._ask(wire, parameters)
        return self._read(completion, sampling)

    async def __aenter__(self) -> Self:
        """Open the policy, and find out the model's name and kind of server if they are not given.

        Raises:
            PrerequisiteError: an environment variable with a credential is missing.
            ConfigError: the endpoint serves several models, and ``model`` is not given.
            ModelAPIError: the list of its models could not be read.
        """
        if self._find_model or self._token_ids is None:
            await self._discover_endpoint()
        api = ModelAPI(self._spec, f"policy:{self._spec.model}")
        await api.start()
        self._api = api
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        api, self._api = self._api, None
        if api is not None:
            await api.release()

    async def _discover_endpoint(self) -> None:
        """Ask the endpoint which models it serves, and whether it is vLLM."""
        spec = self._spec
        credentials = Credentials.from_environment(spec.api_key_env, dict(spec.headers_env).items())
        async with ModelClient(spec.base_url, credentials=credentials) as client:
            try:
                body = await client.request("GET", "/models", call_timeout_s=30.0)
                answer = read_json(body)
                names = read_models(answer)
            except APIMalformed as error:
                if self._find_model:
                    raise APIMalformed(f"The answer of {spec.base_url}/models {error}") from None
                return
            except ModelAPIError:
                if self._find_model:
                    raise
                return  # not all endpoints have a list of models, and nothing else depends on it
        if self._find_model:
            if len(names) != 1:
                raise ConfigError(
                    f"{spec.base_url} serves {len(names)} models{': ' if names else ''}{', '.join(names[:20])}. Name "
                    "one: OpenAIPolicy(url, 'name'), or policy.model=name."
                )
            self._spec = ModelAPISpec(**{**_fields_of(spec), "model": names[0]})
        if self._token_ids is None:
            self._token_ids = any(one.get("owned_by") == "vllm" for one in answer["data"])

    async def _ask(self, messages: Sequence[Json], parameters: dict[str, Any]) -> ChatCompletion:
        if self._api is None:
            raise UsageError("The policy is not open. Use it as `async with policy: …`.")
        try:
            return await self._api.chat(messages, **parameters)
        except APIRefused as refusal:
            reason = str(refusal)
            if refusal.status == 413 or (refusal.status in (400, 422) and _TOO_LONG.search(reason)):
                raise PromptTooLong(reason) from refusal
            if self._limit not in parameters or "Use 'max_completion_tokens'" not in reason:
                raise
        parameters["max_completion_tokens"] = parameters.pop(self._limit)
        self._limit = "max_completion_tokens"  # OpenAI's newer models know the limit by this name only
        return await self._ask(messages, parameters)

    def _parameters(self, tools: Sequence[Mapping[str, Any]], sampling: SamplingParams) -> dict[str, Any]:
        asked: dict[str, Any] = {"temperature": sampling.temperature, self._limit: sampling.max_tokens}
        if sampling.top_p < 1:
            asked["top_p"] = sampling.top_p
        if sampling.top_k > 0:
            asked["top_k"] = sampling.top_k
        if sampling.seed is not None:
            asked["seed"] = sampling.seed
        if tools:
            asked["tools"] = list(tools)
        if self._token_ids:
            asked |= {"return_token_ids": True, "logprobs": True}
        return {name: value for name, value in asked.items() if name not in self._omit}

    def _read(self, completion: ChatCompletion, sampling: SamplingParams) -> ChatGeneration:
        reason = (completion.finish_reason or "").lower()
        if reason in _ABORTED:
            raise PolicyError(f"{self._spec.model} at {self._spec.base_url} aborted an answer ({reason}).")
        usage = completion.usage
        used = usage.completion_tokens if usage is not None else 0
        cut = reason in _CUT or (not reason and used >= sampling.max_tokens)  # not all say why they ended
        finish: Literal["stop", "length"] = "length" if cut else "stop"
        choice = completion.raw["choices"][0]
        message = choice["message"]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        prompt_ids, ids, logprobs = _tokens(completion, choice)
        distorted = sampling.temperature != 1.0 or sampling.top_p < 1.0 or sampling.top_k > 0
        return ChatGeneration(
            content=completion.text or str(message.get("refusal") or ""),
            calls=() if finish == "length" else tuple(map(_tool_call, completion.tool_calls)),
            finish_reason=finish,
            reasoning=reasoning if isinstance(reasoning, str) else None,
            prompt_ids=prompt_ids,
            ids=ids,
            logprobs=None if distorted else logprobs,
            prompt_tokens=usage.prompt_tokens if usage is not None else None,
            sampled_tokens=usage.completion_tokens if usage is not None else None,
        )


def _wire_messages(messages: Sequence[Message], *, send_reasoning: bool) -> Iterator[dict[str, Any]]:
    """Yield messages in the format of OpenAI's API.

    Tool messages can only contain text there, so images of tool results follow in a user message.
    """
    for message in move_tool_images_to_user_messages(messages):
        wire: dict[str, Any] = {name: value for name, value in message.items() if name != "reasoning_content"}
        if send_reasoning and "reasoning_content" in message:
            wire["reasoning_content"] = message["reasoning_content"]
        if not isinstance(message["content"], str):
            wire["content"] = [
                {**part} if part["type"] == "text" else _image_part(part["image"].url) for part in message["content"]
            ]
        if calls := message.get("tool_calls"):
            wire["tool_calls"] = [{**call, "function": _wire_function(call["function"])} for call in calls]
        yield wire


def _image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _wire_function(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}


def _tool_call(call: FunctionCall) -> ToolCall:
    arguments, error = _arguments(call.arguments)
    return ToolCall(call.id, call.name, arguments, error)


def _arguments(text: str) -> tuple[dict[str, Any] | None, str | None]:
    """Return the arguments of a call, or the error for the model."""
    try:
        value = json.loads(text.strip() or "{}", parse_constant=_refuse_constant)
        wrong = None if isinstance(value, dict) else f"they are {type_of(value)}"
    except (ValueError, RecursionError) as error:
        value, wrong = None, str(error)
    if wrong is None:
        return value, None
    wrote = text if len(text) <= 800 else f"{text[:400]} [… {len(text) - 800} characters left out …] {text[-400:]}"
    return None, (
        "This tool call was not executed, because its arguments are not a JSON object: "
        f"{wrong}. Write them as an object, for instance {{}} for none. You wrote: {wrote}"
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def _tokens(completion: ChatCompletion, choice: Json) -> tuple[list[int] | None, list[int] | None, list[float] | None]:
    """Return the ids of the prompt, the sampled ids and their log-probs, if the endpoint reports them.

    Raises:
        TokenInvariantError: the endpoint's count of sampled tokens differs from the number of ids.
    """
    prompt_ids, ids = completion.raw.get("prompt_token_ids"), choice.get("token_ids")
    if not _are_ids(prompt_ids) or not _are_ids(ids):
        return None, None, None
    if completion.usage is not None and completion.usage.completion_tokens != len(ids):
        raise TokenInvariantError(
            f"The endpoint sent the ids of {len(ids)} tokens, but reports "
            f"{completion.usage.completion_tokens} sampled tokens. Set OpenAIPolicy(token_ids=False) to do without ids."
        )
    return prompt_ids, ids, _logprobs(choice, len(ids))


def _logprobs(choice: Json, count: int) -> list[float] | None:
    """Return the log-probs of ``count`` sampled tokens; None if they are missing or invalid."""
    reported = choice.get("logprobs")
    found = reported.get("content") if isinstance(reported, Mapping) else None
    if not isinstance(found, list) or len(found) != count:
        return None
    logprobs: list[Any] = [one.get("logprob") if isinstance(one, Mapping) else None for one in found]
    if not all(type(one) in (int, float) and -_LEAST < one < _ROUNDING for one in logprobs):
        return None
    return [min(0.0, float(one)) for one in logprobs]


def _are_ids(found: Any) -> TypeGuard[list[int]]:
    return isinstance(found, list) and bool(found) and all(type(one) is int and 0 <= one < 2**31 for one in found)


def _require_fields(settings: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(ModelAPISpec) if field.name not in ("base_url", "model")]
    for name in settings:
        if name not in known:
            raise ConfigError(f"OpenAIPolicy has no setting {name!r}. {suggest_name(name, known)}")


def _fields_of(spec: ModelAPISpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
