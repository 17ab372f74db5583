"""The model calls of a rollout: a tree of requests and answers, and the protocols of the APIs that carry them."""

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
    """A chain of model calls in one token sequence.

    Attributes:
        name: the ID under which the policy keeps its state for the branch.
        recorder: records its tokens.
        last_call: the last recorded call.
        busy: whether an answer that will extend the branch is being sampled.
    """

    name: str
    recorder: TokenRecorder
    last_call: ModelCall | None = None
    busy: bool = False


@dataclass(frozen=True)
class PreparedCall:
    """A request that is ready to be answered.

    Attributes:
        request: the request.
        parent: the call that it continues; None for a new conversation.
        known: the number of its messages that belong to the parent's conversation.
        prompt: the whole conversation as ids.
        sampling: the effective sampling parameters.
        branch: the branch that the answer will extend.
        calls: the number of tool calls in the conversation so far.
        parent_turns: the turns that led to it; see `agentfly.core.trajectory.Turn.parent_turns`.
    """

    request: ModelRequest
    parent: ModelCall | None
    known: int
    prompt: RenderedTokens
    sampling: EffectiveSampling
    branch: SequenceBranch
    calls: int
    parent_turns: tuple[int, ...]


@dataclass(frozen=True)
class UnrecordedAnswer:
    """The data of a model call that is needed until the call is recorded.

    Attributes:
        prompt: the rendered request.
        answer: the model's answer.
        sampling: the effective sampling parameters.
        seconds: the duration of the generation.
    """

    prompt: RenderedTokens
    answer: ModelAnswer
    sampling: EffectiveSampling
    seconds: float


@dataclass(eq=False)
class ModelCall:
    """One request and its answer.

    A call is recorded once its answer has reached the program.

    Attributes:
        parent: the call that it continues; None for a new conversation.
        new_messages: the messages of the request that are not in the parent's conversation.
        message: the answer, as a message of the conversation.
        calls: the tool calls in the answer.
        asked_hash: the hash of the request's conversation; see `ModelRequest.hashes`.
        hash: the hash of the conversation including the answer.
        length: the number of messages including the answer.
        parent_turns: the turns that led to it.
        branch: the branch that it belongs to.
        pending: the data that is not recorded yet; None once it is recorded.
        span: its tokens in the trajectory; None until it is recorded.
        turn: the index of its turn; None until it is recorded.
        continued: whether another call continues it.
    """

    parent: ModelCall | None
    new_messages: Sequence[Message]
    message: Message
    calls: Sequence[ToolCall]
    asked_hash: int
    hash: int
    length: int
    parent_turns: tuple[int, ...]
    branch: SequenceBranch
    pending: UnrecordedAnswer | None
    span: TokenSpan | None = None
    turn: int | None = None
    continued: bool = False

    @property
    def path(self) -> list[ModelCall]:
        """The calls that led to this one, and itself as the last."""
        path, model_call = [self], self.parent
        while model_call is not None:
            path.append(model_call)
            model_call = model_call.parent
        return path[::-1]

    @property
    def conversation(self) -> list[Message]:
        """All messages, up to and including the answer."""
        return [message for model_call in self.path for message in (*model_call.new_messages, model_call.message)]

    def tokens(self, sequences: Sequence[TokenSequence]) -> RenderedTokens:
        """Return all tokens of the conversation, up to and including the answer."""
        assert self.span is not None
        sequence, stop = sequences[self.span.sequence], self.span.stop
        return RenderedTokens(sequence.ids[:stop], tuple(image for image in sequence.images if image.stop <= stop))


class CallTree:
    """The model calls of a rollout, found by their conversations.

    A lookup takes time in proportion to the request, and nearly independent of the number of calls.
    """

    def __init__(self) -> None:
        self._by_hash: dict[int, list[ModelCall]] = {}
        self._beginnings: dict[int, ModelCall] = {}

    def add(self, model_call: ModelCall) -> None:
        """Add a call."""
        self._by_hash.setdefault(model_call.hash, []).append(model_call)
        if model_call.parent is not None:
            model_call.parent.continued = True
        else:
            self._beginnings.setdefault(model_call.asked_hash, model_call)

    def find_parent(self, request: ModelRequest) -> ModelCall | None:
        """Return the deepest call that a request continues, or None.

        Among calls with equal conversations, one that has not been continued is preferred.
        """
        for length in range(len(request.conversation) - 1, 0, -1):
            fitting = self._by_hash.get(request.hashes[length], ())
            for model_call in sorted(fitting, key=lambda one: one.continued or one.branch.busy):
                if model_call.length == length and _is_repeated(model_call, request):
                    return model_call
        return None

    def find_same_start(self, request: ModelRequest) -> ModelCall | None:
        """Return the earlier call that started the same conversation, or None."""
        found = self._beginnings.get(request.hashes[-1])
        if found is None or len(found.new_messages) != len(request.conversation):
            return None
        return found if all(map(same_message, found.new_messages, request.conversation)) else None


def _is_repeated(model_call: ModelCall, request: ModelRequest) -> bool:
    """Return whether a request begins with the conversation of a call."""
    return all(map(same_message, model_call.conversation, request.conversation))


class ProgramResponse(Protocol):
    """An answer of the model in the format of the API."""

    def whole(self) -> Mapping[str, Any]:
        """Return the complete answer, as JSON."""
        ...

    def events(self) -> Iterable[bytes]:
        """Return the answer as server-sent events with the same content."""
        ...


class ProgramCall(Protocol):
    """A parsed request of a program."""

    @property
    def request(self) -> ModelRequest:
        """The request to the model."""
        ...

    @property
    def streams(self) -> bool:
        """Whether the program wants server-sent events."""
        ...

    def reply(self, answered: UnrecordedAnswer) -> ProgramResponse:
        """Return the final answer in the format of the API."""
        ...

    def failed(self, refusal: RequestError) -> bytes:
        """Return the event that reports an error in a stream whose status is already sent."""
        ...


class ProgramAPI(Protocol):
    """An API that programs use to call models. It parses requests and writes answers, and knows no rollouts."""

    @property
    def path(self) -> str:
        """The path of requests, below a rollout's base URL."""
        ...

    def read(self, body: bytes) -> ProgramCall:
        """Parse the body of a request. It may run on any thread.

        Raises:
            RequestError: the body is not a valid request, exceeds a limit, or needs an unsupported feature.
        """
        ...


class CallTracker:
    """Tracks the calls of a program, to find out how its rollout ended.

    Attributes:
        failure: the failure of the last call; None if it succeeded.
        refusal: the error text of the last refused call; empty if there is none.
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
        """Track a call that waits for its answer inside the block."""
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
        """Note a delivered answer. It cancels out the failures of earlier calls."""
        self._given_up, self._begun_before_answer = False, self._begun

    def mark_lost(self) -> None:
        """Note that the program had disconnected before its answer was ready."""
        self._given_up = True

    @property
    def abandoned(self) -> bool:
        """Whether the program's last call is unanswered: it was given up, or it is still waiting.

        A call that began before the last delivered answer does not count, because the program went on without it.
        """
        return self._given_up or any(map(self._is_last, self._waiting))

    def no_answer_failure(self) -> Failure:
        """Return the failure of a rollout without any answered call, which the policy did not cause."""
        if self.abandoned:
            reason = "It gave up its last call before the model had answered."
        elif self.refusal:
            reason = f"Its last call was refused: {self.refusal:.500}"
        else:
            reason = "It made no call. Check that it has the base URL and the key of its rollout."
        message = f"No call of the program was answered, so the model had no part in the rollout. {reason}"
        return Failure(Boundary.USAGE, "NoModelCalls", message, by_policy=False)

    def _is_last(self, number: int) -> bool:
        return number > self._begun_before_answer
