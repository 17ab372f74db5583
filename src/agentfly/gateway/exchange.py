"""Exchange: one request of a program and its answer. Exchanges that continue one another are a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agentfly.gateway.conversation import same_messages
from agentfly.gateway.dialect import Said
from agentfly.messages import Message
from agentfly.rollouts.chat.chat_format import Definitions, Rendered
from agentfly.rollouts.tape import Place, Tape
from agentfly.tokens import TokenSequence


@dataclass(eq=False)
class Line:
    """Exchanges that continue one another in one token sequence.

    Attributes:
        name: under which the policy keeps what it knows of the line.
        tape: the record of its tokens.
        tip: the last exchange on the record.
        busy: whether an answer is being sampled that will continue it.
    """

    name: str
    tape: Tape
    tip: Exchange | None = None
    busy: bool = False


@dataclass(frozen=True)
class Question:
    """A request that is to be answered.

    Attributes:
        parent: the exchange that it continues; None for a new conversation.
        new: its messages that were not in the parent's conversation.
        tools: the tools it offers.
        prompt: the whole conversation as ids.
        line: where the answer is going to stand.
        calls: how many tool calls the conversation holds so far.
        follows: the turns that led to it; see `agentfly.trajectory.Turn.follows`.
    """

    parent: Exchange | None
    new: Sequence[Message]
    tools: Definitions
    prompt: Rendered
    line: Line
    calls: int
    follows: tuple[int, ...] = ()


@dataclass(eq=False)
class Exchange:
    """One request and its answer.

    An answer counts as said once it has reached the program, and is on the record from then on.

    Attributes:
        question: what was asked.
        said: what was answered.
        seconds: how long the generation took.
        place: where its tokens stand in the trajectory; None until it is on the record.
        turn: number of the turn, likewise.
        children: the exchanges that continue it.
    """

    question: Question
    said: Said
    seconds: float
    place: Place | None = None
    turn: int | None = None
    children: list[Exchange] = field(default_factory=list)

    @property
    def parent(self) -> Exchange | None:
        """The exchange that it continues."""
        return self.question.parent

    @property
    def conversation(self) -> list[Message]:
        """All messages up to the answer."""
        before = self.parent.conversation if self.parent is not None else []
        return [*before, *self.question.new, self.said.message]

    def tokens(self, sequences: Sequence[TokenSequence]) -> Rendered:
        """Everything that was sent and sampled up to its answer."""
        assert self.place is not None
        sequence, stop = sequences[self.place.sequence], self.place.stop
        return Rendered(sequence.ids[:stop], tuple(image for image in sequence.images if image.stop <= stop))


def continued_by(
    roots: Sequence[Exchange], conversation: Sequence[Message], tools: Definitions
) -> tuple[Exchange | None, int]:
    """The exchange that a conversation continues, the deepest one, and how many of its messages that one holds.

    Of several that said the same, it is one that nothing has continued yet.
    """
    fitting = [
        (end, not exchange.children and not exchange.question.line.busy, exchange)
        for root in roots
        if list(root.question.tools) == list(tools)
        for exchange, end in _along(root, conversation)
    ]
    best = max(fitting, key=lambda one: one[:2], default=None)
    return (best[2], best[0]) if best is not None else (None, 0)


def same_question(question: Question, conversation: Sequence[Message], tools: Definitions) -> bool:
    """Whether a request asks what has been asked before."""
    return list(question.tools) == list(tools) and same_messages(question.new, conversation)


def _along(root: Exchange, conversation: Sequence[Message]) -> Iterator[tuple[Exchange, int]]:
    """The exchanges from a root on that a conversation repeats and goes on from, each with where it ends in it."""
    ahead = [(root, 0)]
    while ahead:
        exchange, start = ahead.pop()
        known = [*exchange.question.new, exchange.said.message]
        end = start + len(known)
        if end < len(conversation) and same_messages(known, conversation[start:end]):
            yield exchange, end
            ahead += [(child, end) for child in exchange.children]
