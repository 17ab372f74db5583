"""ChatFormat: how a conversation becomes token ids that only grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentfly.images import PlacedImage
from agentfly.messages import Message, ToolCall

Definitions = Sequence[Mapping[str, Any]]
"""Tools as chat templates want them described: see `agentfly.agents.tool.Tool.definition`."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A stretch of a conversation as ids, none of them sampled.

    Attributes:
        ids: token ids.
        images: the images in it; the places are within ``ids``.
    """

    ids: Sequence[int]
    images: tuple[PlacedImage, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """A generation as the format reads it.

    Attributes:
        text: everything that was sampled as text, without the control token at its end.
        content: what of it is said, without the thoughts.
        reasoning: the thoughts; None where there are none.
        calls: the tool calls, where the format reads calls itself; None where the agent's tool-call format is to read
            them in ``text``.
        opened: the marker by which the prompt had opened thinking, so that ``text`` begins inside; empty where it had
            not.
    """

    text: str
    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] | None = None
    opened: str = ""


class ChatFormat(Protocol):
    """Renders what is not sampled, and reads what is: the first prompt, what follows each generation, the replies."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end an assistant's turn."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Definitions = ()) -> Rendered:
        """A whole conversation, with the header of the assistant's turn at its end.

        Args:
            messages: the conversation.
            tools: the tools that the format is to describe; none where the conversation itself describes them.
        """
        ...

    def continuation(
        self,
        messages: Sequence[Message],
        *,
        after: Sequence[int],
        conversation: Sequence[Message],
        tools: Definitions = (),
    ) -> Rendered | None:
        """What follows a generation: end of turn if it was not sampled, ``messages``, the header of the next turn.

        Args:
            messages: what answers the generation: tool results, or user messages.
            after: all ids that were sent and sampled so far; the last one may be a stop id.
            conversation: the whole conversation, with the last generation and ``messages`` at its end.
            tools: as of the prompt.

        Returns:
            What follows ``after``. None where the format would now write the conversation so far in another way, and
            is told not to put up with that: then the conversation goes on in a new sequence, begun with `prompt`.
        """
        ...

    def reply(self, ids: Sequence[int]) -> Reply:
        """What a generation says."""
        ...
