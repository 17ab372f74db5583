"""Proof: that what a chat template writes turn by turn is what it writes for the conversation as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Self, cast

from agentfly.agents.toolcalls.format import ToolCallFormat, call_id, message_with_calls
from agentfly.errors import ChatFormatError
from agentfly.messages import Message, ToolCall, text_of
from agentfly.rollouts.chat.chat_format import Definitions
from agentfly.rollouts.chat.drift import first_difference
from agentfly.rollouts.chat.shape import QUESTION
from agentfly.rollouts.chat.skeleton import Words, first_place, spans_of
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


_SEEN = 30
"""So many characters of an answer must be written. What a template leaves out of long ones is its own affair."""

_LENGTHY = "and many more lines of the same kind " * 120

ANSWERED = Exchange({"role": "assistant", "content": "answer"}, ({"role": "user", "content": "the next question"},))
"""A turn without calls, and what a user says to it."""


def without_words(messages: Sequence[Message]) -> list[Message]:
    """A conversation in which the assistant has said nothing of its own: what is left in it others have written."""
    return [
        ANSWERED.turn
        if message["role"] == "assistant"
        else cast(Message, {name: value for name, value in message.items() if name != "name"})
        if message["role"] == "tool"
        else message
        for message in messages
    ]


def with_long_answers(exchange: Exchange) -> Exchange:
    """The same with answers of several thousand characters, which some templates shorten once they are old."""
    answers = [{**answer, "content": f"{text_of(answer['content'])} {_LENGTHY}"} for answer in exchange.answers]
    return Exchange(exchange.turn, tuple(cast(list[Message], answers)))


def with_words(exchange: Exchange) -> Exchange:
    """The same with words of a user behind the answers, as memory adds them."""
    return Exchange(exchange.turn, (*exchange.answers, *ANSWERED.answers))


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
            kinds.append(with_words(exchange))
    return kinds


def require_written(
    turns: Turns, exchanges: Sequence[Exchange], tools: Definitions, system: Message | None = None
) -> None:
    """Raise unless the template can write whole conversations of these exchanges and of their `mishaps`.

    Raises:
        ChatFormatError: it refuses one, or leaves an answer out.
    """
    for kind in mishaps(exchanges):
        require_answers(turns.whole(_conversation([kind, kind], system)[1], tools), kind)


def prove(
    turns: Turns,
    exchanges: Sequence[Exchange],
    tools: Definitions,
    system: Message | None,
    *,
    count: int,
) -> None:
    """Compare a conversation of such exchanges, one kind after the other, turn by turn and as a whole.

    Where a turn begins, one of the two may be ahead: the header at the end of a conversation may open thoughts, and
    a turn of the past may begin with what the model says itself, as it does when it is the last.

    Args:
        turns: the template.
        exchanges: the kinds of exchanges.
        tools: the tools, where the template is to describe them.
        system: the system message, if there is one.
        count: how many exchanges the conversation has. Some templates leave out or shorten what is far enough back.

    Raises:
        ChatFormatError: they differ by more than thoughts, or something is left out.
    """
    kinds = [_Kind.of(turns, exchange, tools, system) for exchange in exchanges]
    opening, conversation, numbers = _conversation(list(islice(cycle(exchanges), count)), system)
    whole = turns.bare(conversation, tools)
    spans, end, by_turn = spans_of(whole), 0, turns.whole(opening, tools)
    for number, kind in zip(numbers, cycle(kinds), strict=False):
        span = spans.get(number)
        if span is None or not kind.words <= span.words:
            raise _left_out(conversation, number)
        if not _agree(turns, whole[end : span.start], by_turn, kind.beginning):
            raise _difference(whole[end : span.start], by_turn)
        end, by_turn = turns.end_behind(whole, span.stop), kind.answered
    if whole[end:] != by_turn:
        raise _difference(whole[end:], by_turn)


@dataclass(frozen=True)
class _Kind:
    """A kind of exchange, and how a template writes it at the end of a short conversation.

    Attributes:
        beginning: what its turn begins with besides its header when it is the last.
        answered: what stands behind its turn.
        words: which words of its turn are written.
    """

    beginning: str
    answered: str
    words: frozenset[Words]

    @classmethod
    def of(cls, turns: Turns, exchange: Exchange, tools: Definitions, system: Message | None) -> Self:
        opening, conversation, [number] = _conversation([exchange], system)
        start = turns.whole(opening, tools)
        first_place(written := turns.bare(conversation, tools), number)  # raises where it leaves the turn out
        own = _own_beginning(turns, conversation[: number + 1], start, tools)
        answered = turns.following(exchange.answers, tools)
        require_answers(answered, exchange)
        return cls(own, answered, spans_of(written)[number].words)


def keeps_thoughts(turns: Turns, exchange: Exchange, tools: Definitions, system: Message | None, *, count: int) -> bool:
    """Whether the template goes on writing the thoughts of a turn once the conversation has gone on, to its end."""
    thinking = Exchange({**exchange.turn, "reasoning_content": "thought"}, exchange.answers)
    opening, conversation, _ = _conversation([thinking] * count, system)
    asked = turns.places(conversation, len(opening))
    written = spans_of(turns.bare(conversation, tools)).get(len(opening))
    return not any("thought" in each for each in asked) or (written is not None and "thought" in written.words)


def require_answers(rendered: str, exchange: Exchange) -> None:
    """Raise unless the answers are in a rendered text.

    Raises:
        ChatFormatError: one of them is not.
    """
    for answer in exchange.answers:
        if text_of(answer["content"])[:_SEEN] not in rendered:
            raise ChatFormatError(
                f"The model's chat template leaves out messages of the role {answer['role']!r}, so the model would "
                "never see what its tools answer. Use a tool-call format whose results are user messages, for "
                "instance 'action', or a model whose template knows the role."
            )


def _conversation(
    exchanges: Sequence[Exchange], system: Message | None
) -> tuple[list[Message], list[Message], list[int]]:
    """What a conversation begins with, the whole of it, and where in it the turns stand."""
    opening = [*([system] if system else []), QUESTION]
    conversation, numbers = [*opening], []
    for exchange in exchanges:
        numbers.append(len(conversation))
        conversation += [exchange.turn, *exchange.answers]
    return opening, conversation, numbers


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


def _left_out(conversation: Sequence[Message], number: int) -> ChatFormatError:
    return ChatFormatError(
        "The model's chat template is not prefix-stable: in a conversation of "
        f"{len(conversation)} messages it no longer writes all that the assistant said and called in message "
        f"{number + 1}. Say Agent(history='rewrite') to begin a new sequence wherever it leaves something out, or use "
        "a template that keeps earlier turns as they are."
    )


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
