"""The chain strategy: one growing conversation, all its turns trained on one sequence."""

from __future__ import annotations

from collections.abc import Sequence

from agentfly.messages import Message
from agentfly.rollouts.chat.chat_format import ChatFormat, Definitions, Rendered
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
        continuation = self._continuation(view, tools)
        if continuation is None:
            self._tape.begin(self._chat.prompt(view, tools))
        else:
            self._tape.extend(continuation)
        self._known = list(view)

    def length(self, view: Sequence[Message], tools: Definitions = ()) -> int:
        """The length of the sequence with what is new in ``view``, or of the new sequence that it would begin."""
        continuation = self._continuation(view, tools)
        if continuation is None:
            return len(self._chat.prompt(view, tools).ids)
        return self._tape.length + len(continuation.ids)

    def replied(self, message: Message) -> None:
        """The last turn's answer, with which the next view must go on."""
        self._known.append(message)

    def _continuation(self, view: Sequence[Message], tools: Definitions) -> Rendered | None:
        known = len(self._known)
        if not known or len(view) <= known or list(view[:known]) != self._known:
            return None
        return self._chat.continuation(view[known:], after=self._tape.ids, conversation=view, tools=tools)
