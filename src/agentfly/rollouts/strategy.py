"""Strategy: how the turns of a conversation become token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentfly.messages import Message
from agentfly.rollouts.chat.chat_format import Definitions


class Strategy(Protocol):
    """Puts on a `agentfly.rollouts.tape.Tape` what is sent for the next turn of one conversation."""

    def show(self, view: Sequence[Message], tools: Definitions = ()) -> None:
        """Put on the tape what the policy is to see before its next turn.

        Args:
            view: the conversation as the agent's memory recalls it.
            tools: the tools that the chat format is to describe.
        """
        ...

    def length(self, view: Sequence[Message], tools: Definitions = ()) -> int:
        """How many tokens the policy would see if ``view`` were shown now. Nothing is put on the tape."""
        ...

    def replied(self, message: Message) -> None:
        """The policy has answered what was shown last; ``message`` is the answer as it stands in the conversation."""
        ...
