"""ProgramAPI: one of the APIs that programs speak to models by. It knows no rollouts; a session knows no API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from agentfly.gateway.exchange import Pending
from agentfly.gateway.model_request import ModelRequest
from agentfly.gateway.refusal import Refusal


class Reply(Protocol):
    """An answer of the model, as the API writes it."""

    def whole(self) -> Mapping[str, Any]:
        """The answer in one piece, as JSON."""
        ...

    def events(self) -> Iterable[bytes]:
        """The answer as server-sent events, which together say the same."""
        ...


class ProgramCall(Protocol):
    """A request that was read."""

    @property
    def request(self) -> ModelRequest:
        """What is asked of the model."""
        ...

    @property
    def streams(self) -> bool:
        """Whether the answer is to be server-sent events."""
        ...

    def reply(self, answered: Pending) -> Reply:
        """The answer, of which nothing changes any more."""
        ...

    def failed(self, refusal: Refusal) -> bytes:
        """The event that ends a stream which cannot be answered any more by a status."""
        ...


class ProgramAPI(Protocol):
    """How requests are read and answers written."""

    @property
    def path(self) -> str:
        """Where requests go, below a rollout's base URL."""
        ...

    def read(self, body: bytes) -> ProgramCall:
        """A request from the body that was sent. It may run on any thread.

        Raises:
            Refusal: it is none, it exceeds a limit, or it asks for what cannot be done.
        """
        ...
