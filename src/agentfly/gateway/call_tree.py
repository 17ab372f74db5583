"""Exchange: one request of a program and its answer. Exchanges that continue one another are a tree.

ExchangeTree: the exchanges of a rollout, found by the conversations that go on from them.

ProgramAPI: one of the APIs that programs speak to models by. It knows no rollouts; a session knows no API.

CallLog: which calls of a program wait for an answer, and what became of the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from agentfly.core.errors import Boundary
from agentfly.core.messages import Message, ToolCall
from agentfly.core.tokens import TokenSequence
from agentfly.core.trajectory import Failure
from agentfly.formats.chat.chat_format import RenderedTokens
from agentfly.gateway.limits import RequestError
from agentfly.gateway.model_request import EffectiveSampling, ModelRequest, same_message
from agentfly.gateway.request_codec import ModelAnswer
from agentfly.rollouts.token_recorder import TokenRecorder, TokenSpan


@dataclass(eq=False)
class SequenceBranch:
    """Exchanges that continue one another in one token sequence.

    Attributes:
        name: under which the policy keeps what it knows of the branch.
        recorder: the record of its tokens.
        last_call: the last exchange on the record.
        busy: whether an answer is being sampled that will continue it.
    """

    name: str
    recorder: TokenRecorder
    last_call: ModelCall | None = None
    busy: bool = False


@dataclass(frozen=True)
class PreparedCall:
    """A request that is to be answered.

    Attributes:
        request: the request.
        parent: the exchange that it continues; None for a new conversation.
        known: how many of its messages that one holds.
        prompt: the whole conversation as ids.
        sampling: how the answer is sampled.
        branch: where the answer is going to stand.
        calls: how many tool calls the conversation holds so far.
        follows: the turns that led to it; see `agentfly.core.trajectory.Turn.follows`.
    """

    request: ModelRequest
    parent: ModelCall | None
    known: int
    prompt: RenderedTokens
    sampling: EffectiveSampling
    branch: SequenceBranch
    calls: int
    follows: tuple[int, ...]


@dataclass(frozen=True)
class UnrecordedAnswer:
    """What is kept of an exchange until it is on the record, which then has all that is needed of it.

    Attributes:
        prompt: what was sent.
        answer: what was answered.
        sampling: how it was sampled.
        seconds: how long the generation took.
    """

    prompt: RenderedTokens
    answer: ModelAnswer
    sampling: EffectiveSampling
    seconds: float


@dataclass(eq=False)
class ModelCall:
    """One request and its answer.

    An answer counts as said once it has reached the program, and is on the record from then on.

    Attributes:
        parent: the exchange that it continues; None for a new conversation.
        new_messages: the messages of the request that were not in the parent's conversation.
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

    parent: ModelCall | None
    new_messages: Sequence[Message]
    message: Message
    calls: Sequence[ToolCall]
    asked_hash: int
    hash: int
    length: int
    follows: tuple[int, ...]
    branch: SequenceBranch
    pending: UnrecordedAnswer | None
    place: TokenSpan | None = None
    turn: int | None = None
    continued: bool = False

    @property
    def path(self) -> list[ModelCall]:
        """The exchanges that led to it, and itself at the end."""
        path, exchange = [self], self.parent
        while exchange is not None:
            path.append(exchange)
            exchange = exchange.parent
        return path[::-1]

    @property
    def conversation(self) -> list[Message]:
        """All messages up to the answer."""
        return [message for exchange in self.path for message in (*exchange.new_messages, exchange.message)]

    def tokens(self, sequences: Sequence[TokenSequence]) -> RenderedTokens:
        """Everything that was sent and sampled up to its answer."""
        assert self.place is not None
        sequence, stop = sequences[self.place.sequence], self.place.stop
        return RenderedTokens(sequence.ids[:stop], tuple(image for image in sequence.images if image.stop <= stop))


class CallTree:
    """The exchanges of a rollout.

    To find one takes a time that grows with the request, and hardly with how many exchanges there are.
    """

    def __init__(self) -> None:
        self._by_hash: dict[int, list[ModelCall]] = {}
        self._beginnings: dict[int, ModelCall] = {}

    def add(self, exchange: ModelCall) -> None:
        """Another exchange."""
        self._by_hash.setdefault(exchange.hash, []).append(exchange)
        if exchange.parent is not None:
            exchange.parent.continued = True
        else:
            self._beginnings.setdefault(exchange.asked_hash, exchange)

    def find_parent(self, request: ModelRequest) -> ModelCall | None:
        """The exchange that a request continues, the deepest one.

        Of several that said the same, it is one that nothing has continued yet.
        """
        for length in range(len(request.conversation) - 1, 0, -1):
            fitting = self._by_hash.get(request.hashes[length], ())
            for exchange in sorted(fitting, key=lambda one: one.continued or one.branch.busy):
                if exchange.length == length and _is_repeated(exchange, request):
                    return exchange
        return None

    def find_same_start(self, request: ModelRequest) -> ModelCall | None:
        """The exchange by which the same conversation was begun before, if it was."""
        found = self._beginnings.get(request.hashes[-1])
        if found is None or len(found.new_messages) != len(request.conversation):
            return None
        return found if all(map(same_message, found.new_messages, request.conversation)) else None


def _is_repeated(exchange: ModelCall, request: ModelRequest) -> bool:
    """Whether a request begins with the conversation of an exchange."""
    return all(map(same_message, exchange.conversation, request.conversation))


class ProgramResponse(Protocol):
    """An answer of the model, as the API writes it."""

    def whole(self) -> Mapping[str, Any]:
        """The answer in one piece, as JSON."""
        ...

    def events(self) -> Iterable[bytes]:
        """The answer as server-sent events, which together say the same."""
        ...


class ProgramCall(Protocol):
    """A request that was read."""

    @property
    def request(self) -> ModelRequest:
        """What is asked of the model."""
        ...

    @property
    def streams(self) -> bool:
        """Whether the answer is to be server-sent events."""
        ...

    def reply(self, answered: UnrecordedAnswer) -> ProgramResponse:
        """The answer, of which nothing changes any more."""
        ...

    def failed(self, refusal: RequestError) -> bytes:
        """The event that ends a stream which cannot be answered any more by a status."""
        ...


class ProgramAPI(Protocol):
    """How requests are read and answers written."""

    @property
    def path(self) -> str:
        """Where requests go, below a rollout's base URL."""
        ...

    def read(self, body: bytes) -> ProgramCall:
        """A request from the body that was sent. It may run on any thread.

        Raises:
            Refusal: it is none, it exceeds a limit, or it asks for what cannot be done.
        """
        ...


class CallTracker:
    """The calls of one rollout's program, as far as they say how the rollout ended.

    Attributes:
        failure: why the last call failed; None if it did not.
        refusal: why the last call that was refused was.
    """

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.refusal = ""
        self._begun = 0
        self._waiting: set[int] = set()
        self._begun_before_answer = 0  # how many calls had begun when the last answer arrived
        self._given_up = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call waits for its answer within."""
        self._begun += 1
        number = self._begun
        self._waiting.add(number)
        try:
            yield
        except asyncio.CancelledError:
            self._given_up = self._given_up or self._is_last(number)
            raise
        finally:
            self._waiting.discard(number)

    def delivered(self) -> None:
        """The program has an answer. It makes up for the calls before it."""
        self._given_up, self._begun_before_answer = False, self._begun

    def mark_lost(self) -> None:
        """The program was not there any more when an answer was."""
        self._given_up = True

    @property
    def abandoned(self) -> bool:
        """Whether the program does not wait for its last answer any more, or must not as of now.

        A call that was made before another one was answered does not count: the program had no more need of it.
        """
        return self._given_up or any(map(self._is_last, self._waiting))

    def no_answer_failure(self) -> Failure:
        """Why a rollout in which no call was answered counts as failed: the policy had no part in it."""
        if self.abandoned:
            told = "It gave up its last call before the model had answered."
        elif self.refusal:
            told = f"Its last call was refused: {self.refusal:.500}"
        else:
            told = "It made no call: was it told the base URL and the key of its rollout?"
        message = f"No call of the program was answered, so the model had no part in the rollout. {told}"
        return Failure(Boundary.USAGE, "NoModelCalls", message, by_policy=False)

    def _is_last(self, number: int) -> bool:
        return number > self._begun_before_answer
