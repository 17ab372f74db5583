"""The wire: what OpenAI's chat API says on both sides, as far as the gateway speaks it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentfly.errors import AgentFlyError, PromptTooLong, UsageError, say


class Refusal(Exception):
    """A request that is answered with an error.

    Attributes:
        status: the HTTP status.
        code: what programs tell errors apart by.
        param: the parameter that is to blame.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """What a program is told of a failure. One that the machine is to blame for is a 500, which clients retry."""
        if isinstance(error, Refusal):
            return error
        if isinstance(error, PromptTooLong):
            return cls(str(error), code="context_length_exceeded", param="messages")
        if isinstance(error, UsageError):
            return cls(str(error))
        if isinstance(error, UnicodeError):
            return cls(f"The conversation holds characters that are no text: {error}.", param="messages")
        return cls(str(error) if isinstance(error, AgentFlyError) else say(error), status=500)

    def to_json(self) -> dict[str, Any]:
        """The error as OpenAI writes one."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class ChatRequest(BaseModel):
    """A request for a chat completion. What does not change the answer is ignored; what cannot be done is refused."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
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
            raise _refusal_of(error) from None
        for param, why in request._cannot_be():
            raise Refusal(f"{param}: {why}", code="unsupported_parameter", param=param)
        return request

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
        if self.top_logprobs:
            yield "top_logprobs", "only the log-probs of the sampled tokens are known. Leave it out."
        if (self.response_format or {}).get("type", "text") != "text":
            yield "response_format", "answers cannot be forced into a form. Ask for it in words, and check the answer."
        for param, neutral in _NEUTRAL.items():
            found = (self.model_extra or {}).get(param)
            if found is not None and found not in neutral:
                yield param, f"{found!r} cannot be done here; leave it out."


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
"""Parameters that change what is sampled, and the values with which they do not."""


class FinishRequest(BaseModel):
    """What a program says of a rollout when it is over."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    reward: float | None = None
    task: str | dict[str, Any] | None = None
    group_id: str | None = None
    attempt: Annotated[int, Field(ge=0)] | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    error: str | None = None

    @classmethod
    def read(cls, body: bytes) -> FinishRequest:
        """A request from the body that was sent.

        Raises:
            Refusal: it is none.
        """
        try:
            return cls.model_validate_json(body or b"{}")
        except ValidationError as error:
            raise _refusal_of(error) from None


def _refusal_of(error: ValidationError) -> Refusal:
    problem = error.errors(include_url=False)[0]
    param = ".".join(map(str, problem["loc"])) or None
    return Refusal(f"{param or 'The body'}: {problem['msg']}.", param=param)
