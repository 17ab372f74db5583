"""The step strategy: every turn is prompted afresh, and is a sequence of its own."""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.messages import Message
from agentfly.rollouts.chat.chat_format import ChatFormat, Definitions
from agentfly.rollouts.tape import Tape


class Step:
    """Begins a new sequence at every turn, from what the agent's memory recalls of the turns before.

    Args:
        chat: renders the conversation.
        tape: takes what is sent.
    """

    def __init__(self, chat: ChatFormat, tape: Tape) -> None:
        self._chat = chat
        self._tape = tape

    def show(self, view: Sequence[Message], tools: Definitions = ()) -> None:
        """Put the whole of ``view`` on the tape."""
        self._tape.begin(self._chat.prompt(view, tools))

    def length(self, view: Sequence[Message], tools: Definitions = ()) -> int:
        """The length of the whole of ``view``."""
        return len(self._chat.prompt(view, tools).ids)

    def replied(self, message: Message) -> None:
        """Nothing is continued, so nothing is to be known of it."""
