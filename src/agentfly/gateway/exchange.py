"""Exchange: one request of a program and its answer. Exchanges that continue one another are a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentfly.gateway.model_codec import ModelAnswer
from agentfly.gateway.model_request import ModelRequest
from agentfly.gateway.sampling import Sampling
from agentfly.messages import Message, ToolCall
from agentfly.rollouts.chat.chat_format import Rendered
from agentfly.rollouts.tape import Place, Tape
from agentfly.tokens import TokenSequence


@dataclass(eq=False)
class Branch:
    """Exchanges that continue one another in one token sequence.

    Attributes:
        name: under which the policy keeps what it knows of the branch.
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
        request: the request.
        parent: the exchange that it continues; None for a new conversation.
        known: how many of its messages that one holds.
        prompt: the whole conversation as ids.
        sampling: how the answer is sampled.
        branch: where the answer is going to stand.
        calls: how many tool calls the conversation holds so far.
        follows: the turns that led to it; see `agentfly.trajectory.Turn.follows`.
    """

    request: ModelRequest
    parent: Exchange | None
    known: int
    prompt: Rendered
    sampling: Sampling
    branch: Branch
    calls: int
    follows: tuple[int, ...]


@dataclass(frozen=True)
class Pending:
    """What is kept of an exchange until it is on the record, which then has all that is needed of it.

    Attributes:
        prompt: what was sent.
        answer: what was answered.
        sampling: how it was sampled.
        seconds: how long the generation took.
    """

    prompt: Rendered
    answer: ModelAnswer
    sampling: Sampling
    seconds: float


@dataclass(eq=False)
class Exchange:
    """One request and its answer.

    An answer counts as said once it has reached the program, and is on the record from then on.

    Attributes:
        parent: the exchange that it continues; None for a new conversation.
        new: the messages of the request that were not in the parent's conversation.
        message: the answer, as it stands in the conversation.
        calls: the tool calls in it.
        asked_hash: the hash of the conversation that was answered; see `ModelRequest.hashes`.
        hash: the same of the conversation with the answer at its end.
        length: how many messages that one has.
        follows: the turns that led to it.
        branch: where it stands, or is going to stand, on the record.
        pending: what is yet to be put on the record; None once it is there.
        place: where its tokens stand in the trajectory; None until it is on the record.
        turn: number of the turn, likewise.
        continued: whether an exchange continues it.
    """

    parent: Exchange | None
    new: Sequence[Message]
    message: Message
    calls: Sequence[ToolCall]
    asked_hash: int
    hash: int
    length: int
    follows: tuple[int, ...]
    branch: Branch
    pending: Pending | None
    place: Place | None = None
    turn: int | None = None
    continued: bool = False

    @property
    def path(self) -> list[Exchange]:
        """The exchanges that led to it, and itself at the end."""
        path, exchange = [self], self.parent
        while exchange is not None:
            path.append(exchange)
            exchange = exchange.parent
        return path[::-1]

    @property
    def conversation(self) -> list[Message]:
        """All messages up to the answer."""
        return [message for exchange in self.path for message in (*exchange.new, exchange.message)]

    def tokens(self, sequences: Sequence[TokenSequence]) -> Rendered:
        """Everything that was sent and sampled up to its answer."""
        assert self.place is not None
        sequence, stop = sequences[self.place.sequence], self.place.stop
        return Rendered(sequence.ids[:stop], tuple(image for image in sequence.images if image.stop <= stop))
