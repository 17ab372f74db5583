"""Proof: that what a chat template writes turn by turn is what it writes for the conversation as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentfly.agents.toolcalls.format import ToolCallFormat, call_id, message_with_calls
from agentfly.errors import ChatFormatError
from agentfly.messages import Message, ToolCall, text_of
from agentfly.rollouts.chat.chat_format import Definitions
from agentfly.rollouts.chat.drift import first_difference
from agentfly.rollouts.chat.shape import QUESTION
from agentfly.rollouts.chat.skeleton import first_place
from agentfly.rollouts.chat.turns import Turns


@dataclass(frozen=True)
class Exchange:
    """A turn of the assistant and the messages that answer it, as one kind of them looks in an agent's conversation."""

    turn: Message
    answers: tuple[Message, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "answers", tuple(self.answers))

    @classmethod
    def calling(cls, tool: str, count: int, calls: ToolCallFormat) -> Exchange:
        """A turn that calls a tool so many times, and the results, as a tool-call format has them in a conversation."""
        made = [ToolCall(call_id(number), tool) for number in range(count)]
        plain: Message = {"role": "assistant", "content": "calls"}
        answers = (calls.result(call, f"observation {number}") for number, call in enumerate(made))
        return cls(message_with_calls("", made) if calls.in_template else plain, tuple(answers))


ANSWERED = Exchange({"role": "assistant", "content": "answer"}, ({"role": "user", "content": "the next question"},))
"""A turn without calls, and what a user says to it."""


def mishaps(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """These exchanges, and what may become of them in a rollout.

    That is: calls that could not be read, and so stand as text in front of their results; words of a user behind the
    results, as memory adds them; and a turn that says something, or nothing, before a user goes on.
    """
    said, words = ANSWERED.turn, ANSWERED.answers[0]
    kinds = [ANSWERED, Exchange({**said, "content": ""}, (words,))]
    for exchange in exchanges:
        kinds += [exchange, Exchange(said, exchange.answers)]
        if exchange.answers[-1]["role"] == "tool":
            kinds.append(Exchange(exchange.turn, (*exchange.answers, words)))
    return kinds


def require_written(
    turns: Turns, exchanges: Sequence[Exchange], tools: Definitions, system: Message | None = None
) -> None:
    """Raise unless the template can write whole conversations of these exchanges and of their `mishaps`.

    Raises:
        ChatFormatError: it refuses one, or leaves an answer out.
    """
    for kind in mishaps(exchanges):
        require_answers(turns.whole(_conversation(kind, system)[1], tools), kind)


def prove(turns: Turns, exchange: Exchange, tools: Definitions, system: Message | None) -> None:
    """Compare a conversation of two exchanges, turn by turn and as a whole.

    Where a turn begins, one of the two may be ahead: the header at the end of a conversation may open thoughts, and
    a turn of the past may begin with what the model says itself, as it does when it is the last.

    Raises:
        ChatFormatError: they differ by more than thoughts, or something is left out.
    """
    opening, conversation = _conversation(exchange, system)
    first, second = len(opening), len(opening) + 1 + len(exchange.answers)
    alone = turns.following(exchange.answers, tools)
    require_answers(alone, exchange)
    whole = turns.bare(conversation, tools)
    start = turns.whole(opening, tools)
    own = _own_beginning(turns, conversation[: first + 1], start, tools)
    parts = [
        (whole[: first_place(whole, first)], start),
        (whole[turns.end_of(whole, first) : first_place(whole, second)], alone),
    ]
    for in_whole, by_turn in parts:
        if not _agree(turns, in_whole, by_turn, own):
            raise _difference(in_whole, by_turn)
    end = whole[turns.end_of(whole, second) :]
    if end != alone:
        raise _difference(end, alone)


def keeps_thoughts(turns: Turns, exchange: Exchange, tools: Definitions, system: Message | None) -> bool:
    """Whether the template goes on writing the thoughts of a turn once the conversation has gone on."""
    thinking = Exchange({**exchange.turn, "reasoning_content": "thought"}, exchange.answers)
    opening, conversation = _conversation(thinking, system)
    whole = turns.bare(conversation, tools)
    return all(place in whole for place in turns.places(conversation, len(opening)) if "thought" in place)


def require_answers(rendered: str, exchange: Exchange) -> None:
    """Raise unless the answers are in a rendered text.

    Raises:
        ChatFormatError: one of them is not.
    """
    for answer in exchange.answers:
        if text_of(answer["content"]) not in rendered:
            raise ChatFormatError(
                f"The model's chat template leaves out messages of the role {answer['role']!r}, so the model would "
                "never see what its tools answer. Use a tool-call format whose results are user messages, for "
                "instance 'action', or a model whose template knows the role."
            )


def _conversation(exchange: Exchange, system: Message | None) -> tuple[list[Message], list[Message]]:
    opening = [*([system] if system else []), QUESTION]
    return opening, [*opening, exchange.turn, *exchange.answers, exchange.turn, *exchange.answers]


def _own_beginning(turns: Turns, conversation: Sequence[Message], start: str, tools: Definitions) -> str:
    """What a turn begins with besides its header when it is the last."""
    try:
        rendered = turns.bare(conversation, tools, opens=False)
    except ChatFormatError:
        return ""
    beginning = rendered[: first_place(rendered, len(conversation) - 1)]
    header = turns.shape.thoughts.unopened(start)
    return beginning[len(header) :] if beginning.startswith(header) else ""


def _agree(turns: Turns, in_whole: str, by_turn: str, own: str) -> bool:
    thoughts = turns.shape.thoughts
    header = thoughts.unopened(by_turn)
    if in_whole.startswith(header):
        return thoughts.unmarked(in_whole[len(header) :]) == thoughts.unmarked(own)
    return header.startswith(in_whole) and not thoughts.unmarked(header[len(in_whole) :])


def _difference(in_whole: str, by_turn: str) -> ChatFormatError:
    return ChatFormatError(
        "The model's chat template is not prefix-stable: it writes something else once the conversation goes on. As "
        f"part of the whole: {_around_difference(in_whole, by_turn)}; turn by turn: "
        f"{_around_difference(by_turn, in_whole)}. Say Agent(history='rewrite') to begin a new sequence wherever it "
        "does, or use a template that keeps earlier turns as they are."
    )


def _around_difference(text: str, other: str) -> str:
    at = first_difference(text, other)
    return repr(text[max(0, at - 40) : at + 40])
