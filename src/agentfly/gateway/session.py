"""One rollout of a program: its model calls, and the trajectory that they produce."""

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
"""Size in characters or bytes from which reading or rendering takes milliseconds and runs on a thread."""

MAX_CONCURRENT = 2


class ThreadOffloader:
    """Runs small work on the event loop, and larger work on a thread.

    Work that has started is awaited even after its caller is cancelled. So cancelled callers cannot pile up threads.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MAX_CONCURRENT)

    async def run(self, work: Callable[[], T], *, size: int) -> T:
        """Return the result of ``work``.

        Args:
            work: a thread-safe function.
            size: the number of characters or bytes that it processes.
        """
        if size < OFFLOAD_CHARS:
            return work()
        async with self._free:
            return await run_in_thread_to_completion(work)


_BYTES_A_TOKEN = 40
"""Memory of a recorded token: id, source, two log-probs and version, with room to grow."""


class ProgramSession:
    """One rollout of a program.

    A call that continues the latest answer extends its token sequence, exactly as sampled. A call that continues an
    earlier answer, or runs in parallel to such a call, starts a new sequence with the shared tokens as untrained
    prompt. Other messages start a new conversation. An answer is recorded once it has been delivered to the program.

    Args:
        rollout_id: the rollout's ID.
        policy: samples the answers.
        codec: renders conversations for the model, and parses its answers.
        sampling: the sampling parameters of the rollout.
        limits: the limits of the program.
        heavy: runs large work on threads.
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
        self._preparing = asyncio.Lock()  # prepare one request at a time, so that rollouts take turns
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
        """Answer a call of the program inside the block. Its request has ``size`` bytes.

        Raises:
            RequestError: the rollout is over, or already answers its maximum number of calls.
        """
        self._require_open()
        with self._allowance.call(size):
            try:
                yield
            except Exception as error:
                self._log.refusal = str(error)
                raise

    async def decode(self, decode: Callable[[], T], *, size: int) -> T:
        """Decode a request of the program, on a thread if it is large."""
        async with self._preparing:
            return await self._heavy.run(decode, size=size)

    async def answer(self, request: ModelRequest) -> ModelCall:
        """Have the model answer a request. Cancelling it aborts the generation and records nothing.

        Raises:
            RequestError: the rollout is over, or was finished during the call, or its record is full.
            PromptTooLong: the conversation leaves no room for an answer.
            ChatFormatError: the model's chat template rejects the conversation.
            AgentFlyError: the policy failed. The rollout counts as failed unless a later call succeeds.
        """
        self._require_open()
        with self._allowance.answer(), self._log.call():
            async with self._preparing:
                prepared = await self._prepare(request)
            started = time.perf_counter()
            generation = await self._sample(prepared)
            self._require_open()
        self._log.failure = None
        answer = self._codec.read(generation, request, first_call=prepared.calls)
        model_call = _model_call(prepared, answer, time.perf_counter() - started)
        self._tree.add(model_call)
        self._allowance.record_bytes += size_of([*model_call.new_messages, model_call.message]) + _waiting_bytes(
            model_call.pending
        )
        return model_call

    def mark_delivered(self, model_call: ModelCall) -> None:
        """Record an answer that the program has received."""
        if not self._closed:
            with contextlib.suppress(TokenInvariantError):  # the rollout fails, but the answer is already sent
                self.record(model_call)

    def mark_undelivered(self, model_call: ModelCall, request: bytes, *, seen_in_part: bool) -> None:
        """Keep an answer that did not arrive completely, for a retry of the same request.

        If the program has seen a part of it, it may have acted on that part. Then the answer is recorded even without
        a retry.
        """
        if model_call.pending is not None:
            self._undelivered.setdefault(request, []).append(model_call)
            if seen_in_part:
                self._seen_in_part[id(model_call)] = model_call
            else:
                self._log.mark_lost()

    def undelivered_answer(self, request: bytes) -> ModelCall | None:
        """Return the first undelivered answer to the same request, or None."""
        waiting = self._undelivered.pop(request, [])
        while waiting:
            model_call = waiting.pop(0)
            if model_call.pending is not None:
                if waiting:
                    self._undelivered[request] = waiting
                self._seen_in_part.pop(id(model_call), None)
                return model_call
        return None

    def record(self, model_call: ModelCall) -> None:
        """Record a call, unless it is recorded already.

        Raises:
            TokenInvariantError: its tokens violate the invariants of token sequences. The rollout fails.
        """
        pending = model_call.pending
        if pending is None:
            return
        self._log.delivered()
        try:
            span = self._record_tokens(model_call, pending)
        except TokenInvariantError as error:
            self._failure = Failure.of(error)
            raise
        model_call.span, model_call.turn, model_call.pending = span, len(self.trajectory.turns), None
        self._latest = model_call
        self._replaced.add(pending.sampling)
        self.trajectory.untrainable_reason = self.trajectory.untrainable_reason or pending.sampling.untrainable_reason
        answer = pending.answer
        reasoning, content = answer.message.get("reasoning_content"), text_of(answer.message["content"])
        self.trajectory.turns.append(
            Turn(
                index=model_call.turn,
                sequence=span.sequence,
                start=span.start,
                stop=span.stop,
                text=answer.text,
                ended_by_model=answer.generation.finish_reason == "stop",
                generation_seconds=pending.seconds,
                reasoning=reasoning,
                content=None if content == answer.text else content,
                parent_turns=model_call.parent_turns,
                prompt_tokens=len(pending.prompt.ids),
                sampled_tokens=span.stop - span.start,
            )
        )
        for before in model_call.parent_turns:
            self._ends.pop(before, None)
        self._ends[model_call.turn] = None
        if model_call.parent is not None:
            self._record_results(model_call.parent, model_call.new_messages)

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
        """End the rollout and its running calls, and return the trajectory.

        The reward is dropped if the rollout failed for a reason outside the policy, or if no call was answered.
        """
        given_up = self._log.abandoned
        for model_call in self._seen_in_part.values():
            self.mark_delivered(model_call)
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
        spoiled = trajectory.infrastructure_failed  # its reward does not count
        trajectory.reward = None if spoiled else reward
        trajectory.finish_reason = self._finish_reason(given_up)
        trajectory.notes = self._notes(reward if spoiled else None)
        generation = sum(turn.generation_seconds for turn in trajectory.turns)
        trajectory.seconds = {"total": time.perf_counter() - self._started, "generation": generation}
        return trajectory

    def close(self) -> None:
        """Cancel the running calls, and refuse further ones."""
        self._closed = True
        self._undelivered.clear()
        for running in self._running:
            running.cancel()
        for branch in self._branches:
            self._policy.release_rollout(branch.name)

    async def _prepare(self, request: ModelRequest) -> PreparedCall:
        """Find the call that a request continues, and render the request."""
        sampling = self._sampling.resolve(request.sampling)
        parent = self._tree.find_parent(request)
        before = None
        if parent is not None:
            self.record(parent)  # a program that continues an answer has received it
            before = parent.tokens(self.trajectory.sequences)
            assert parent.turn is not None
            parent_turns: tuple[int, ...] = (parent.turn,)
        else:
            # A new conversation follows all earlier answers: it may hold a summary of them.
            same = self._tree.find_same_start(request)
            parent_turns = same.parent_turns if same is not None else tuple(self._ends)
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
        return PreparedCall(request, parent, known, prompt, sampling, self._branch_after(parent), calls, parent_turns)

    def _rendered(self, request: ModelRequest, known: int, before: RenderedTokens | None) -> RenderedTokens:
        """Render a request. It keeps the ids of the call that it continues, unless the chat format rewrites them."""
        conversation, tools = request.conversation, request.tools
        prompt = None
        if before is not None:
            prompt = self._codec.continuation(conversation[known:], before, conversation, tools)
        if prompt is None:
            prompt = self._codec.prompt(conversation, tools)
        return RenderedTokens(array("i", prompt.ids), prompt.images)

    async def _sample(self, prepared: PreparedCall) -> Generation:
        prompt, branch, how = prepared.prompt, prepared.branch, prepared.sampling
        sampling = SamplingParams(
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            max_tokens=min(prepared.request.max_tokens, self._policy.context_length - len(prompt.ids)),
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
                self._require_open()  # the rollout has ended: report that to the program
            raise
        finally:
            branch.busy = False
            self._running.discard(running)

    def _record_tokens(self, model_call: ModelCall, pending: UnrecordedAnswer) -> TokenSpan:
        branch = model_call.branch
        if branch.last_call is not None and branch.last_call is not model_call.parent:
            branch = self._new_branch()  # another answer was faster
        before = branch.last_call.span if branch.last_call is not None else None
        branch.recorder.continue_or_begin(pending.prompt)
        branch.recorder.prompt_ids()
        span = branch.recorder.append_sampled(pending.answer.generation)
        known = before.stop if before is not None and before.sequence == span.sequence else 0
        self._allowance.record_bytes += _BYTES_A_TOKEN * (span.stop - known) - _waiting_bytes(pending)
        branch.last_call, model_call.branch = model_call, branch
        return span

    def _record_results(self, parent: ModelCall, new: Sequence[Message]) -> None:
        """Record the program's answers to the calls of a turn."""
        turns = self.trajectory.turns
        if parent.turn is None or turns[parent.turn].tool_results:
            return
        answers = {message.get("tool_call_id"): text_of(message["content"]) for message in new}
        results = [ToolRecord(call, answers[call.id]) for call in parent.calls if call.id in answers]
        turns[parent.turn] = replace(turns[parent.turn], tool_results=tuple(results))

    def _notes(self, dropped: float | None) -> list[str]:
        """Return the notes of the trajectory."""
        notes = self._replaced.notes(self._sampling)
        if dropped is not None:
            notes.append(f"The reward {dropped:g} does not count, because the policy did not cause the failure.")
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
            return FinishReason.WALL_TIME  # the program or its harness did not wait for an answer
        return FinishReason.ANSWERED if turns[-1].ended_by_model else FinishReason.LENGTH

    def _branch_after(self, parent: ModelCall | None) -> SequenceBranch:
        if parent is not None and parent.branch.last_call is parent and not parent.branch.busy:
            return parent.branch
        return self._new_branch()

    def _new_branch(self) -> SequenceBranch:
        rollout_id = self.trajectory.rollout_id
        name = f"{rollout_id}/{self._named}" if self._named else rollout_id
        self._named += 1
        recorder = TokenRecorder(
            self.trajectory.sequences,
            max_tokens=self._policy.context_length,
            stop_ids=self._codec.chat.stop_ids,
            barred_ids=image_token_ids(self._policy.tokenizer.vision),
        )
        self._branches.append(SequenceBranch(name, recorder))
        return self._branches[-1]

    def _require_open(self) -> None:
        if self._closed:
            raise RequestError(f"The rollout {self.trajectory.rollout_id!r} is finished.", status=409, code="finished")


def _model_call(prepared: PreparedCall, answer: ModelAnswer, seconds: float) -> ModelCall:
    request = prepared.request
    (with_answer,) = extend_hashes(request.hashes[-1], [answer.message])
    return ModelCall(
        parent=prepared.parent,
        new_messages=request.conversation[prepared.known :],
        message=answer.message,
        calls=answer.calls,
        asked_hash=request.hashes[-1],
        hash=with_answer,
        length=len(request.conversation) + 1,
        parent_turns=prepared.parent_turns,
        branch=prepared.branch,
        pending=UnrecordedAnswer(prepared.prompt, answer, prepared.sampling, seconds),
    )


def _waiting_bytes(pending: UnrecordedAnswer | None) -> int:
    """Return the memory of an answer that is not recorded yet, in bytes."""
    if pending is None:
        return 0
    return 4 * len(pending.prompt.ids) + _BYTES_A_TOKEN * len(pending.answer.generation.ids)


def _is_cancelled() -> bool:
    """Return whether the current task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _first_words(messages: Sequence[Message]) -> str:
    return next((text_of(message["content"]) for message in messages if message["role"] == "user"), "")
