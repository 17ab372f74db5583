"""ChatFormat: how a conversation becomes token ids that only grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentfly.messages import Message


class ChatFormat(Protocol):
    """Renders what is not sampled: the first prompt, and what follows each generation."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an assistant's turn."""
        ...

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the conversation's start, with the header of the assistant's first turn."""
        ...

    def continuation(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
        """Ids that follow a generation: end of turn, ``messages``, and the header of the assistant's next turn.

        Args:
            messages: what answers the generation: tool results, or user messages.
            ended: whether the generation's last id is a stop id, which is then not rendered again.
        """
        ...

    def text(self, ids: Sequence[int]) -> str:
        """The text of a generation, without the stop id at its end."""
        ...
