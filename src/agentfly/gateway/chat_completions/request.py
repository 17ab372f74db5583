"""ChatRequest: a request for a chat completion as OpenAI's API has it, as far as the gateway speaks it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentfly.gateway.refusal import Refusal
from agentfly.gateway.sampling import FOLLOWED, NEUTRAL

MAX_STOPS = 16
"""How many texts may end an answer. OpenAI takes 4."""

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class ChatRequest(BaseModel):
    """A request for a chat completion. What does not change the answer is ignored; what cannot be done is refused."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    model: Annotated[str, Field(max_length=1_000)] = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    return_token_ids: bool | None = None

    @classmethod
    def read(cls, body: bytes) -> ChatRequest:
        """A request from the body that was sent.

        Raises:
            Refusal: it is none, or asks for what cannot be done.
        """
        try:
            request = cls.model_validate_json(body or b"{}")
        except ValidationError as error:
            raise Refusal.of_invalid(error) from None
        for param, why in request._cannot_be():
            raise Refusal(f"{param}: {why}", code="unsupported_parameter", param=param)
        return request

    @property
    def sampling(self) -> dict[str, Any]:
        """The parameters of sampling that it names."""
        named = {name: getattr(self, name) for name in FOLLOWED}
        named |= {name: value for name, value in (self.model_extra or {}).items() if name in NEUTRAL}
        if self.top_k == -1:
            named["top_k"] = 0  # both take all tokens
        return {name: value for name, value in named.items() if value is not None}

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end the answer."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stop if text)

    @property
    def limit(self) -> int | None:
        """The most tokens to sample."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    @property
    def may_call(self) -> bool:
        """Whether calls in the answer are read as such."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with the usage."""
        return bool((self.stream_options or {}).get("include_usage"))

    def _cannot_be(self) -> Iterator[tuple[str, str]]:
        """What would change the answer and cannot be done, with what to do instead."""
        if self.n not in (None, 1):
            yield "n", f"only one answer a call is given, not {self.n}. Make as many calls, which may run at a time."
        if self.tool_choice not in (None, "none", "auto"):
            yield (
                "tool_choice",
                "the model decides which tool to call, if any: write 'auto' or 'none', or leave it out.",
            )
        if len(self.stops) > MAX_STOPS:
            yield "stop", f"at most {MAX_STOPS} texts may end an answer, not {len(self.stops)}."
        if self.top_logprobs:
            yield "top_logprobs", "only the log-probs of the sampled tokens are known. Leave it out."
        if (self.response_format or {}).get("type", "text") != "text":
            yield "response_format", "answers cannot be forced into a form. Ask for it in words, and check the answer."
        for param, neutral in _UNSUPPORTED.items():
            found = (self.model_extra or {}).get(param)
            if found is not None and found not in neutral:
                yield param, f"{found!r:.100} cannot be done here; leave it out."


_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
"""Parameters that change what the answer is about, and the values with which they do not."""
