"""Speaker: the model's side of a conversation. It has the model say its next turn, and records the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentfly.agents.toolcalls.format import call_id, message_with_calls
from agentfly.messages import Message, ToolCall
from agentfly.rollouts.tape import Place


@dataclass(frozen=True, slots=True)
class Utterance:
    """One turn of the model.

    Attributes:
        message: the turn as it stands in the conversation.
        text: everything that was sampled, without the control token at its end.
        content: what of it was said, without the thoughts.
        reasoning: the thoughts in it, where the format tells them apart.
        calls: the tool calls in it. A turn that a limit cut makes none, even if what is left of it happens to parse.
        stopped: whether the model ended the turn itself.
        place: where its tokens stand; None where nobody tells them.
        prompt_tokens, sampled_tokens: how many tokens the model read and sampled; None where nobody tells.
        seconds: how long the generation took.
    """

    message: Message
    text: str
    content: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]
    stopped: bool
    place: Place | None
    prompt_tokens: int | None
    sampled_tokens: int | None
    seconds: float


class Speaker(Protocol):
    """The model's side of one conversation."""

    async def speak(self, view: Sequence[Message], *, max_tokens: int | None = None) -> Utterance | None:
        """The model's next turn, or None if no token of it would fit; nothing is sampled then.

        Args:
            view: the conversation as the agent's memory recalls it.
            max_tokens: the most tokens of this turn; as many as the agent's turns may have if not given.
        """
        ...

    def tokens(self, view: Sequence[Message]) -> int | None:
        """How many tokens the model would see if it were shown ``view`` now; None where nobody tells."""
        ...

    def finish(self) -> None:
        """The conversation has ended: check the record, and freeze it."""
        ...


def turn_message(content: str, reasoning: str | None, calls: Sequence[ToolCall]) -> Message:
    """A turn as it stands in the conversation, where thoughts and calls were not read from its text by the agent.

    What answers a call must follow one, so a call that could not be read stands without its arguments.
    """
    written = [call if call.arguments is not None else replace(call, arguments={}) for call in calls]
    message: Message = message_with_calls(content, written) if written else {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


class CallNumbers:
    """Numbers the tool calls of a conversation through, so that every call has an id of its own."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    @property
    def next(self) -> int:
        """The number of the next call."""
        return len(self._taken)

    def claim(self, calls: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
        """The calls with their ids, and new ones where an id is missing or was given before."""
        claimed = []
        for call in calls:
            name, number = call.id, self.next
            while not name or name in self._taken:
                name, number = call_id(number), number + 1
            self._taken.add(name)
            claimed.append(call if name == call.id else replace(call, id=name))
        return tuple(claimed)
