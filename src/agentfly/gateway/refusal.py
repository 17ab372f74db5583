"""Refusal: a request that is answered with an error."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from agentfly.agents.excerpt import excerpt
from agentfly.errors import AgentFlyError, PromptTooLong, UsageError, say

MESSAGE_CHARS = 1_500


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

    @classmethod
    def of_invalid(cls, error: ValidationError) -> Refusal:
        """What is told of a body that is not what it should be."""
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(map(str, problem["loc"]))[:200] or None
        return cls(f"{param or 'The body'}: {problem['msg']:.500}.", param=param)

    def to_json(self) -> dict[str, Any]:
        """The error as OpenAI writes one."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        message = excerpt(str(self), MESSAGE_CHARS)  # what was refused may be long, and part of the message
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}
