"""Session: the calls that a program makes in one rollout, and the record of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentfly.errors import PromptTooLong, TokenInvariantError
from agentfly.gateway.dialect import Dialect, Wanted
from agentfly.gateway.exchange import Exchange, Line, Question, continued_by, same_question
from agentfly.gateway.wire import Refusal
from agentfly.messages import Message, text_of
from agentfly.policies.policy import Generation, Policy
from agentfly.policies.vision import barred_ids
from agentfly.rollouts.chat.chat_format import Definitions
from agentfly.rollouts.tape import Place, Tape
from agentfly.task import Task
from agentfly.trajectory import Failure, FinishReason, ToolRecord, Trajectory, Turn


class Session:
    """One rollout of a program.

    A call whose messages go on from what this rollout was answered continues those tokens, exactly as they were
    sampled; one that goes on from an earlier answer, or beside another call that does so, begins a sequence of its own
    with the same tokens before it, of which none is trained twice. Other messages begin a new conversation. Nothing is
    recorded before the program has its answer.

    Args:
        rollout_id: the rollout's name.
        policy: samples.
        dialect: shows conversations to the model, and reads its answers.
    """

    def __init__(self, rollout_id: str, policy: Policy, dialect: Dialect) -> None:
        self._policy = policy
        self._dialect = dialect
        self._roots: list[Exchange] = []
        self._lines: list[Line] = []
        self._undelivered: dict[bytes, Exchange] = {}
        self._running: set[asyncio.Future[Generation]] = set()
        self._latest: Exchange | None = None
        self._ends: dict[int, None] = {}  # the turns on record that no other follows
        self._failure: Failure | None = None  # of the last call, if it failed
        self._spoiled: Failure | None = None
        self._started = time.perf_counter()
        self._closed = False
        self.trajectory = Trajectory(rollout_id, rollout_id, Task(prompt=""))

    async def answer(self, wanted: Wanted) -> Exchange:
        """Have the model answer a request. Cancelling it aborts the generation, and leaves nothing on the record.

        Raises:
            Refusal: the rollout is over, also if it was finished meanwhile.
            PromptTooLong: the conversation leaves no room for an answer.
            ChatFormatError: the model's chat template refuses the conversation.
            AgentFlyError: the policy failed. Unless a later call goes well, the rollout counts as spoiled by it.
        """
        self._require_open()
        question = self._question(wanted)
        started = time.perf_counter()
        generation = await self._sampled(question, wanted)
        self._require_open()
        self._failure = None
        said = self._dialect.read(generation, wanted, first_call=question.calls)
        exchange = Exchange(question, said, time.perf_counter() - started)
        (self._roots if exchange.parent is None else exchange.parent.children).append(exchange)
        return exchange

    def delivered(self, exchange: Exchange) -> None:
        """The program has got an answer."""
        if not self._closed:
            with contextlib.suppress(TokenInvariantError):  # which spoils the rollout, and it is too late to say so
                self.record(exchange)

    def undelivered(self, exchange: Exchange, request: bytes) -> None:
        """An answer could not be sent: it is kept for the program to ask the same again."""
        if exchange.place is None:
            self._undelivered[request] = exchange

    def kept(self, request: bytes) -> Exchange | None:
        """The answer to the same request that the program did not get, if there is one."""
        return self._undelivered.pop(request, None)

    def record(self, exchange: Exchange) -> None:
        """Put an exchange on the record, unless it is there.

        Raises:
            TokenInvariantError: its tokens are not what they should be. The rollout is spoiled.
        """
        if exchange.place is not None:
            return
        try:
            place = self._taped(exchange)
        except TokenInvariantError as error:
            self._spoiled = Failure.of(error)
            raise
        question, said = exchange.question, exchange.said
        exchange.place, exchange.turn = place, len(self.trajectory.turns)
        self._latest = exchange
        reasoning, content = said.message.get("reasoning_content"), text_of(said.message["content"])
        self.trajectory.turns.append(
            Turn(
                index=exchange.turn,
                sequence=place.sequence,
                start=place.start,
                stop=place.stop,
                text=said.text,
                stopped=said.generation.finish == "stop",
                generation_seconds=exchange.seconds,
                reasoning=reasoning,
                content=None if content == said.text else content,
                follows=question.follows,
                prompt_tokens=len(question.prompt.ids),
                sampled_tokens=place.stop - place.start,
            )
        )
        for before in question.follows:
            self._ends.pop(before, None)
        self._ends[exchange.turn] = None
        if question.parent is not None:
            self._record_results(question.parent, question.new)

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

        Raises:
            TokenInvariantError: the record is not what it should be.
        """
        self.close()
        for line in self._lines:
            line.tape.finish()
        trajectory, latest = self.trajectory, self._latest
        trajectory.messages = latest.conversation if latest is not None else []
        trajectory.task = task or Task(prompt=_first_words(trajectory.messages))
        trajectory.group_id, trajectory.attempt = group_id, attempt
        trajectory.reward, trajectory.metrics = reward, dict(metrics)
        trajectory.failure = self._spoiled or failure or self._failure
        trajectory.finish = FinishReason.ANSWERED
        if trajectory.failure is not None:
            trajectory.finish = FinishReason.FAILED
        elif trajectory.turns and not trajectory.turns[-1].stopped:
            trajectory.finish = FinishReason.LENGTH
        generation = sum(turn.generation_seconds for turn in trajectory.turns)
        trajectory.seconds = {"total": time.perf_counter() - self._started, "generation": generation}
        return trajectory

    def close(self) -> None:
        """End what runs in the rollout, and answer no more."""
        self._closed = True
        for running in self._running:
            running.cancel()
        for line in self._lines:
            self._policy.forget(line.name)

    def _question(self, wanted: Wanted) -> Question:
        """Find out what a request continues, and render it."""
        conversation, tools = wanted.conversation, wanted.tools
        parent, known = continued_by(self._roots, conversation, tools)
        prompt = None
        if parent is not None:
            self.record(parent)  # whoever goes on from an answer has got it
        follows = self._led_to(parent, conversation, tools)
        if parent is not None:
            before = parent.tokens(self.trajectory.sequences)
            prompt = self._dialect.continuation(conversation[known:], before, conversation, tools)
        if prompt is None:
            parent, known = None, 0
            prompt = self._dialect.prompt(conversation, tools)
        limit = self._policy.context_length
        if len(prompt.ids) >= limit:
            raise PromptTooLong(
                f"The conversation takes {len(prompt.ids)} tokens, and the model's context length is {limit}. "
                "Shorten it."
            )
        calls = sum(len(message.get("tool_calls") or ()) for message in conversation)
        return Question(parent, conversation[known:], tools, prompt, self._line_after(parent), calls, follows)

    def _led_to(self, parent: Exchange | None, conversation: Sequence[Message], tools: Definitions) -> tuple[int, ...]:
        """The turns that led to a request.

        That is the answer it goes on from. A new conversation comes after all that was answered before it, as what is
        asked of another agent, or with the past summed up. One that was begun before begins again where it began.
        """
        if parent is not None:
            assert parent.turn is not None
            return (parent.turn,)
        for root in self._roots:
            if same_question(root.question, conversation, tools):
                return root.question.follows
        return tuple(self._ends)

    async def _sampled(self, question: Question, wanted: Wanted) -> Generation:
        prompt, line = question.prompt, question.line
        room = self._policy.context_length - len(prompt.ids)
        barred = barred_ids(self._policy.tokenizer.vision)
        sampling = replace(wanted.sampling, max_tokens=min(wanted.sampling.max_tokens, room), barred_ids=barred)
        running = asyncio.ensure_future(
            self._policy.generate(prompt.ids, sampling, rollout_id=line.name, images=prompt.images)
        )
        self._running.add(running)
        line.busy = True
        try:
            return await running
        except BaseException as error:
            if line.tip is None:
                self._lines.remove(line)
                self._policy.forget(line.name)
            if isinstance(error, Exception):
                self._failure = Failure.of(error)
            elif self._closed and not _is_cancelled():
                self._require_open()  # it is the rollout that ended, and the program is told
            raise
        finally:
            line.busy = False
            self._running.discard(running)

    def _taped(self, exchange: Exchange) -> Place:
        question = exchange.question
        line = question.line
        if line.tip is not None and line.tip is not question.parent:
            line = self._new_line()  # another answer was faster
        line.tape.follow(question.prompt)
        line.tape.prompt()
        place = line.tape.sampled(exchange.said.generation)
        line.tip = exchange
        return place

    def _record_results(self, parent: Exchange, new: Sequence[Message]) -> None:
        """Note with a turn what the program answered its calls."""
        if parent.turn is None or self.trajectory.turns[parent.turn].results:
            return
        answers = {message.get("tool_call_id"): text_of(message["content"]) for message in new}
        results = [ToolRecord(call, answers[call.id]) for call in parent.said.calls if call.id in answers]
        self.trajectory.turns[parent.turn] = replace(self.trajectory.turns[parent.turn], results=tuple(results))

    def _line_after(self, parent: Exchange | None) -> Line:
        for line in self._lines:
            if parent is not None and line.tip is parent and not line.busy:
                return line
        return self._new_line()

    def _new_line(self) -> Line:
        rollout_id = self.trajectory.rollout_id
        taken = {line.name for line in self._lines}
        names = itertools.chain([rollout_id], (f"{rollout_id}/{number}" for number in itertools.count(1)))
        name = next(name for name in names if name not in taken)
        stop_ids = self._dialect.chat.stop_ids
        tape = Tape(
            self.trajectory.sequences,
            max_tokens=self._policy.context_length,
            stop_ids=stop_ids,
            token_ids=self._policy.tokenizer.token_ids,
            barred_ids=barred_ids(self._policy.tokenizer.vision),
        )
        self._lines.append(Line(name, tape))
        return self._lines[-1]

    def _require_open(self) -> None:
        if self._closed:
            raise Refusal(f"The rollout {self.trajectory.rollout_id!r} is finished.", status=409, code="finished")


def _is_cancelled() -> bool:
    """Whether the task that runs is itself being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _first_words(messages: Sequence[Message]) -> str:
    return next((text_of(message["content"]) for message in messages if message["role"] == "user"), "")
