"""Strategy: how the turns of a rollout become token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentfly.messages import Message
from agentfly.policies.policy import Generation
from agentfly.tokens import TokenSequence


class Strategy(Protocol):
    """Keeps the token sequences of one rollout. The loop asks it for prompts and tells it what happened."""

    @property
    def sequences(self) -> list[TokenSequence]:
        """The sequences so far, in order."""
        ...

    @property
    def room(self) -> int:
        """How many more tokens the current sequence may hold."""
        ...

    def begin(self, messages: Sequence[Message]) -> None:
        """Take the conversation that the rollout starts from."""
        ...

    def prompt(self) -> Sequence[int]:
        """The ids to send for the next generation."""
        ...

    def sampled(self, generation: Generation) -> tuple[int, int, int]:
        """Take what was sampled for the last prompt; answer (sequence, start, stop) of the turn's tokens."""
        ...

    def observed(self, messages: Sequence[Message]) -> None:
        """Take the messages that answer the last generation."""
        ...

    def finish(self) -> None:
        """The rollout has ended: check every invariant, and freeze the sequences."""
        ...
