"""The chain strategy: one growing conversation, all its turns trained on one sequence."""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.messages import Message
from agentfly.rollouts.chat.chat_format import ChatFormat, Definitions
from agentfly.rollouts.tape import Tape


class Chain:
    """Continues the sequence as long as the conversation only grows.

    It begins a new sequence where it does not: the agent's memory has folded the past, or the chat format would write
    it in another way (``history="rewrite"``).

    Args:
        chat: renders what is not sampled.
        tape: takes what is sent.
    """

    def __init__(self, chat: ChatFormat, tape: Tape) -> None:
        self._chat = chat
        self._tape = tape
        self._known: list[Message] = []

    def show(self, view: Sequence[Message], tools: Definitions = ()) -> None:
        """Put what is new in ``view`` on the tape, or all of it where it is not a continuation."""
        known = len(self._known)
        rendered = None
        if known and len(view) > known and list(view[:known]) == self._known:
            rendered = self._chat.continuation(view[known:], after=self._tape.ids, conversation=view, tools=tools)
        if rendered is None:
            self._tape.begin(self._chat.prompt(view, tools))
        else:
            self._tape.extend(rendered)
        self._known = list(view)

    def replied(self, message: Message) -> None:
        """The last turn's answer, with which the next view must go on."""
        self._known.append(message)
