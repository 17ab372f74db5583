"""HeavyWork: what takes long enough to hold up the event loop, done on threads, a few at a time.

Session: the calls that a program makes in one rollout, and the record of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from agentfly.core.errors import PromptTooLong, TokenInvariantError
from agentfly.core.messages import Message, text_of
from agentfly.core.task import Task
from agentfly.core.threads.pool import run_in_thread_to_completion
from agentfly.core.trajectory import Failure, FinishReason, ToolRecord, Trajectory, Turn
from agentfly.formats.chat.chat_format import RenderedTokens
from agentfly.gateway.call_tree import CallTracker, CallTree, ModelCall, PreparedCall, SequenceBranch, UnrecordedAnswer
from agentfly.gateway.limits import GatewayLimits, RequestError, RolloutQuota
from agentfly.gateway.model_request import ModelRequest, OverriddenParameters, RolloutSampling, extend_hashes, size_of
from agentfly.gateway.request_codec import ModelAnswer, RequestCodec
from agentfly.policies.policy import Generation, Policy, SamplingParams, image_token_ids
from agentfly.rollouts.token_recorder import TokenRecorder, TokenSpan

T = TypeVar("T")

OFFLOAD_CHARS = 32_768
"""From so many characters or bytes on, reading or rendering them is heavy work: it takes milliseconds."""

AT_A_TIME = 2


class ThreadOffloader:
    """Does work on the event loop where there is little of it, and otherwise on a thread.

    Work that was begun is waited for even where nobody wants it any more, so that callers who give up cannot pile it
    up.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(AT_A_TIME)

    async def run(self, work: Callable[[], T], *, size: int) -> T:
        """What work gives.

        Args:
            work: the work; it must be of a kind that a thread can do.
            size: how many characters or bytes it is about.
        """
        if size < OFFLOAD_CHARS:
            return work()
        async with self._free:
            return await run_in_thread_to_completion(work)


_BYTES_A_TOKEN = 40
"""What a token takes on the record: its id, where it came from, two log-probs and the version, with room to grow."""


class ProgramSession:
    """One rollout of a program.

    A call whose messages go on from what this rollout was answered continues those tokens, exactly as they were
    sampled; one that goes on from an earlier answer, or beside another call that does so, begins a sequence of its own
    with the same tokens before it, of which none is trained twice. Other messages begin a new conversation. Nothing is
    recorded before the program has its answer.

    Args:
        rollout_id: the rollout's name.
        policy: samples.
        codec: shows conversations to the model, and reads its answers.
        sampling: how the model samples.
        limits: what the program may take.
        heavy: does what takes long.
    """

    def __init__(
        self,
        rollout_id: str,
        policy: Policy,
        codec: RequestCodec,
        *,
        sampling: RolloutSampling,
        limits: GatewayLimits,
        heavy: ThreadOffloader,
    ) -> None:
        self.trajectory = Trajectory(rollout_id, rollout_id, Task(prompt=""))
        self._policy = policy
        self._codec = codec
        self._sampling = sampling
        self._heavy = heavy
        self._preparing = asyncio.Lock()  # one request at a time is heavy work, so that rollouts take turns
        self._tree = CallTree()
        self._branches: list[SequenceBranch] = []
        self._named = 0
        self._undelivered: dict[bytes, list[ModelCall]] = {}  # by request; the same may have been asked several times
        self._seen_in_part: dict[int, ModelCall] = {}  # by identity
        self._running: set[asyncio.Future[Generation]] = set()
        self._ends: dict[int, None] = {}  # the turns on record that no other follows
        self._latest: ModelCall | None = None
        self._allowance = RolloutQuota(limits)
        self._log = CallTracker()
        self._replaced = OverriddenParameters()
        self._failure: Failure | None = None
        self._started = time.perf_counter()
        self._closed = False

    @contextmanager
    def call(self, size: int) -> Iterator[None]:
        """A call of the program is answered within. Its request has ``size`` bytes.

        Raises:
            Refusal: the rollout is over, or answers as many calls as it may.
        """
        self._require_open()
        with self._allowance.call(size):
            try:
                yield
            except Exception as error:
                self._log.refusal = str(error)
                raise

    async def decode(self, decode: Callable[[], T], *, size: int) -> T:
        """What a request of the program says."""
        async with self._preparing:
            return await self._heavy.run(decode, size=size)

    async def answer(self, request: ModelRequest) -> ModelCall:
        """Have the model answer a request. Cancelling it aborts the generation, and leaves nothing on the record.

        Raises:
            Refusal: the rollout is over, also if it was finished meanwhile, or its record is full.
            PromptTooLong: the conversation leaves no room for an answer.
            ChatFormatError: the model's chat template refuses the conversation.
            AgentFlyError: the policy failed. Unless a later call goes well, the rollout counts as spoiled by it.
        """
        self._require_open()
        with self._allowance.answer(), self._log.call():
            async with self._preparing:
                question = await self._question(request)
            started = time.perf_counter()
            generation = await self._sampled(question)
            self._require_open()
        self._log.failure = None
        answer = self._codec.read(generation, request, first_call=question.calls)
        exchange = _exchange(question, answer, time.perf_counter() - started)
        self._tree.add(exchange)
        self._allowance.record_bytes += size_of([*exchange.new_messages, exchange.message]) + _waiting_bytes(
            exchange.pending
        )
        return exchange

    def mark_delivered(self, exchange: ModelCall) -> None:
        """The program has got an answer."""
        if not self._closed:
            with contextlib.suppress(TokenInvariantError):  # which spoils the rollout, and it is too late to say so
                self.record(exchange)

    def mark_undelivered(self, exchange: ModelCall, request: bytes, *, seen_in_part: bool) -> None:
        """An answer did not arrive as a whole: it is kept for the program to ask the same again.

        If the program has seen a part of it, it may have acted on that. So where it does not ask again, the answer is
        on the record all the same.
        """
        if exchange.pending is not None:
            self._undelivered.setdefault(request, []).append(exchange)
            if seen_in_part:
                self._seen_in_part[id(exchange)] = exchange
            else:
                self._log.mark_lost()

    def undelivered_answer(self, request: bytes) -> ModelCall | None:
        """The first answer to the same request that the program did not get, if there is one."""
        waiting = self._undelivered.pop(request, [])
        while waiting:
            exchange = waiting.pop(0)
            if exchange.pending is not None:
                if waiting:
                    self._undelivered[request] = waiting
                self._seen_in_part.pop(id(exchange), None)
                return exchange
        return None

    def record(self, exchange: ModelCall) -> None:
        """Put an exchange on the record, unless it is there.

        Raises:
            TokenInvariantError: its tokens are not what they should be. The rollout is spoiled.
        """
        pending = exchange.pending
        if pending is None:
            return
        self._log.delivered()
        try:
            place = self._record_tokens(exchange, pending)
        except TokenInvariantError as error:
            self._failure = Failure.of(error)
            raise
        exchange.place, exchange.turn, exchange.pending = place, len(self.trajectory.turns), None
        self._latest = exchange
        self._replaced.add(pending.sampling)
        self.trajectory.untrainable = self.trajectory.untrainable or pending.sampling.untrainable
        answer = pending.answer
        reasoning, content = answer.message.get("reasoning_content"), text_of(answer.message["content"])
        self.trajectory.turns.append(
            Turn(
                index=exchange.turn,
                sequence=place.sequence,
                start=place.start,
                stop=place.stop,
                text=answer.text,
                stopped=answer.generation.finish == "stop",
                generation_seconds=pending.seconds,
                reasoning=reasoning,
                content=None if content == answer.text else content,
                follows=exchange.follows,
                prompt_tokens=len(pending.prompt.ids),
                sampled_tokens=place.stop - place.start,
            )
        )
        for before in exchange.follows:
            self._ends.pop(before, None)
        self._ends[exchange.turn] = None
        if exchange.parent is not None:
            self._record_results(exchange.parent, exchange.new_messages)

    def finish(
        self,
        *,
        task: Task | None,
        reward: float | None,
        group_id: str,
        attempt: int,
        metrics: Mapping[str, float],
        failure: Failure | None,
    ) -> Trajectory:
        """End the rollout, with what runs in it, and close the record.

        The reward does not count where something else than the policy has spoiled the rollout, nor where the program
        has had no answer of the model at all.
        """
        given_up = self._log.abandoned
        for exchange in self._seen_in_part.values():
            self.mark_delivered(exchange)
        self.close()
        try:
            for branch in self._branches:
                branch.recorder.finish()
        except TokenInvariantError as error:
            self._failure = Failure.of(error)
        trajectory, latest = self.trajectory, self._latest
        trajectory.messages = latest.conversation if latest is not None else []
        trajectory.task = task or Task(prompt=_first_words(trajectory.messages))
        trajectory.group_id, trajectory.attempt = group_id, attempt
        trajectory.metrics = dict(metrics)
        trajectory.failure = self._failure or failure or self._log.failure
        if trajectory.failure is None and not trajectory.turns:
            trajectory.failure = self._log.no_answer_failure()
        spoiled = trajectory.infrastructure_failed  # and nothing that it earned counts
        trajectory.reward = None if spoiled else reward
        trajectory.finish = self._finish_reason(given_up)
        trajectory.notes = self._notes(reward if spoiled else None)
        generation = sum(turn.generation_seconds for turn in trajectory.turns)
        trajectory.seconds = {"total": time.perf_counter() - self._started, "generation": generation}
        return trajectory

    def close(self) -> None:
        """End what runs in the rollout, and answer no more."""
        self._closed = True
        self._undelivered.clear()
        for running in self._running:
            running.cancel()
        for branch in self._branches:
            self._policy.release_rollout(branch.name)

    async def _question(self, request: ModelRequest) -> PreparedCall:
        """Find out what a request continues, and render it."""
        sampling = self._sampling.resolve(request.sampling)
        parent = self._tree.find_parent(request)
        before = None
        if parent is not None:
            self.record(parent)  # whoever goes on from an answer has got it
            before = parent.tokens(self.trajectory.sequences)
            assert parent.turn is not None
            follows: tuple[int, ...] = (parent.turn,)
        else:
            # A new conversation comes after all that was answered before it, such as one with the past summed up.
            same = self._tree.find_same_start(request)
            follows = same.follows if same is not None else tuple(self._ends)
        known = parent.length if parent is not None else 0
        prompt = await self._heavy.run(lambda: self._rendered(request, known, before), size=request.size)
        self._require_open()
        limit = self._policy.context_length
        if len(prompt.ids) >= limit:
            raise PromptTooLong(
                f"The conversation takes {len(prompt.ids)} tokens, and the model's context length is {limit}. "
                "Shorten it."
            )
        calls = sum(len(message.get("tool_calls") or ()) for message in request.conversation)
        return PreparedCall(request, parent, known, prompt, sampling, self._branch_after(parent), calls, follows)

    def _rendered(self, request: ModelRequest, known: int, before: RenderedTokens | None) -> RenderedTokens:
        """A request as ids, those of the exchange that it continues first, unless the chat format rewrites them."""
        conversation, tools = request.conversation, request.tools
        prompt = None
        if before is not None:
            prompt = self._codec.continuation(conversation[known:], before, conversation, tools)
        if prompt is None:
            prompt = self._codec.prompt(conversation, tools)
        return RenderedTokens(array("i", prompt.ids), prompt.images)

    async def _sampled(self, question: PreparedCall) -> Generation:
        prompt, branch, how = question.prompt, question.branch, question.sampling
        sampling = SamplingParams(
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            max_tokens=min(question.request.max_tokens, self._policy.context_length - len(prompt.ids)),
            stop_ids=self._codec.chat.stop_ids,
            seed=how.seed,
            suppressed_ids=image_token_ids(self._policy.tokenizer.vision),
        )
        running = asyncio.ensure_future(
            self._policy.generate(prompt.ids, sampling, rollout_id=branch.name, images=prompt.images)
        )
        self._running.add(running)
        branch.busy = True
        try:
            return await running
        except BaseException as error:
            if branch.last_call is None:
                self._branches.remove(branch)
                self._policy.release_rollout(branch.name)
            if isinstance(error, Exception):
                self._log.failure = Failure.of(error)
            elif self._closed and not _is_cancelled():
                self._require_open()  # it is the rollout that ended, and the program is told
            raise
        finally:
            branch.busy = False
            self._running.discard(running)

    def _record_tokens(self, exchange: ModelCall, pending: UnrecordedAnswer) -> TokenSpan:
        branch = exchange.branch
        if branch.last_call is not None and branch.last_call is not exchange.parent:
            branch = self._new_branch()  # another answer was faster
        before = branch.last_call.place if branch.last_call is not None else None
        branch.recorder.continue_or_begin(pending.prompt)
        branch.recorder.prompt_ids()
        place = branch.recorder.append_sampled(pending.answer.generation)
        known = before.stop if before is not None and before.sequence == place.sequence else 0
        self._allowance.record_bytes += _BYTES_A_TOKEN * (place.stop - known) - _waiting_bytes(pending)
        branch.last_call, exchange.branch = exchange, branch
        return place

    def _record_results(self, parent: ModelCall, new: Sequence[Message]) -> None:
        """Note with a turn what the program answered its calls."""
        turns = self.trajectory.turns
        if parent.turn is None or turns[parent.turn].results:
            return
        answers = {message.get("tool_call_id"): text_of(message["content"]) for message in new}
        results = [ToolRecord(call, answers[call.id]) for call in parent.calls if call.id in answers]
        turns[parent.turn] = replace(turns[parent.turn], results=tuple(results))

    def _notes(self, dropped: float | None) -> list[str]:
        """What the record should say besides."""
        notes = self._replaced.told(self._sampling)
        if dropped is not None:
            notes.append(f"The reward {dropped:g} does not count, because the policy is not to blame for the failure.")
        if self._allowance.exhausted:
            notes.append(f"Further calls were refused: {self._allowance.exhausted}")
        return notes

    def _finish_reason(self, given_up: bool) -> FinishReason:
        turns = self.trajectory.turns
        if self.trajectory.failure is not None:
            return FinishReason.FAILED
        if self._allowance.exhausted:
            return FinishReason.MAX_TURNS
        if given_up:
            return FinishReason.WALL_TIME  # the program, or who runs it, did not wait for an answer
        return FinishReason.ANSWERED if turns[-1].stopped else FinishReason.LENGTH

    def _branch_after(self, parent: ModelCall | None) -> SequenceBranch:
        if parent is not None and parent.branch.last_call is parent and not parent.branch.busy:
            return parent.branch
        return self._new_branch()

    def _new_branch(self) -> SequenceBranch:
        rollout_id = self.trajectory.rollout_id
        name = f"{rollout_id}/{self._named}" if self._named else rollout_id
        self._named += 1
        tape = TokenRecorder(
            self.trajectory.sequences,
            max_tokens=self._policy.context_length,
            stop_ids=self._codec.chat.stop_ids,
            barred_ids=image_token_ids(self._policy.tokenizer.vision),
        )
        self._branches.append(SequenceBranch(name, tape))
        return self._branches[-1]

    def _require_open(self) -> None:
        if self._closed:
            raise RequestError(f"The rollout {self.trajectory.rollout_id!r} is finished.", status=409, code="finished")


def _exchange(question: PreparedCall, answer: ModelAnswer, seconds: float) -> ModelCall:
    request = question.request
    (with_answer,) = extend_hashes(request.hashes[-1], [answer.message])
    return ModelCall(
        parent=question.parent,
        new_messages=request.conversation[question.known :],
        message=answer.message,
        calls=answer.calls,
        asked_hash=request.hashes[-1],
        hash=with_answer,
        length=len(request.conversation) + 1,
        follows=question.follows,
        branch=question.branch,
        pending=UnrecordedAnswer(question.prompt, answer, question.sampling, seconds),
    )


def _waiting_bytes(pending: UnrecordedAnswer | None) -> int:
    """What an answer takes that is not on the record yet."""
    if pending is None:
        return 0
    return 4 * len(pending.prompt.ids) + _BYTES_A_TOKEN * len(pending.answer.generation.ids)


def _is_cancelled() -> bool:
    """Whether the task that runs is itself being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _first_words(messages: Sequence[Message]) -> str:
    return next((text_of(message["content"]) for message in messages if message["role"] == "user"), "")
