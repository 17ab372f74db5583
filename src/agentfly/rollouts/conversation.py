"""Conversation: the turns of one agent in a rollout, from its first prompt until it answers or reaches a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from agentfly.agents.memory.memory import FullHistory, Past, recall, require_view
from agentfly.agents.subagent import Subagent
from agentfly.contexts.context import Context
from agentfly.errors import ConversationRefused, PromptTooLong, SubagentUnfinished
from agentfly.messages import Message, ToolCall, image_parts, joined
from agentfly.rollouts.anchor import Situation
from agentfly.rollouts.scribe import Scribe
from agentfly.rollouts.speaker import Utterance
from agentfly.rollouts.tool_calls import INVALID_CALL_KINDS, Executor
from agentfly.rollouts.voice import ChangeOfSampling, Voice
from agentfly.trajectory import Failure, FinishReason, ToolRecord

NOBODY_TOLD: AbstractContextManager[None] = nullcontext()
"""A block of which nobody is told."""


class Conversation:
    """One agent's part in a rollout.

    Args:
        voice: the agent, with what it speaks by.
        asked: the messages of the task, or of the call that the agent answers.
        scribe: keeps the rollout's record.
        context: the rollout's context.
        sampling: changes how the rollout's own policy samples.
        generation: entered while the rollout's own policy makes a generation.
        go_on: called before each turn; what it raises ends the conversation.
        agent: path of the agent's name; empty for the rollout's own.
        name: its own name: the ids of the calls that led to it, joined by ``/``; empty for the rollout's own.
        follows: the turns that led to it; see `agentfly.trajectory.Turn.follows`.

    Attributes:
        messages: the conversation.
        answer: what the agent said last, or what was said to it where a tool has ended the conversation.
        ends: the turns that its next turn follows: its last one, or the last ones of the subagents that answered it.
    """

    def __init__(
        self,
        voice: Voice,
        asked: Sequence[Message],
        *,
        scribe: Scribe,
        context: Context,
        sampling: ChangeOfSampling,
        generation: AbstractContextManager[None] = NOBODY_TOLD,
        go_on: Callable[[], None] = lambda: None,
        agent: str = "",
        name: str = "",
        follows: tuple[int, ...] = (),
    ) -> None:
        system = voice.agent.system_message()
        self.messages: list[Message] = [{"role": "system", "content": system}, *asked] if system else [*asked]
        self.answer = ""
        self.ends = follows
        self._ends_of_subagents: tuple[int, ...] = ()
        self._voice = voice
        self._agent = voice.agent
        self._scribe = scribe
        self._context = context
        self._sampling = sampling
        self._go_on = go_on
        self._generation = generation
        self._told = NOBODY_TOLD if voice.foreign else generation
        self._path = agent
        self._name = name
        self._speaker = voice.speaker(scribe.trajectory.sequences, self._rollout_id, sampling)
        scribe.listen(self._speaker)
        self._speaking = asyncio.Lock()
        self._past = Past(self.messages, context, self._remember, self._speaker.tokens)
        self._situation = Situation(self.messages)
        self._executor = Executor(self._agent, context, scribe.events, voice.cut, self._delegate)
        self._turns = self._tool_calls = self._invalid_calls_in_a_row = 0
        self._too_many_invalid = False

    @property
    def _rollout_id(self) -> str:
        """What the policy knows the conversation by."""
        return "/".join(filter(None, (self._scribe.trajectory.rollout_id, self._name)))

    async def play(self) -> FinishReason:
        """Take turns until the agent has answered, a tool says that it is done, or a limit is reached."""
        if self._agent.max_wall_seconds is None:
            return await self._play()
        limit = asyncio.timeout(self._agent.max_wall_seconds)
        try:
            async with limit:
                return await self._play(limit)
        except TimeoutError:
            if limit.expired():
                return FinishReason.WALL_TIME
            raise

    async def _play(self, limit: asyncio.Timeout | None = None) -> FinishReason:
        while True:
            self._go_on()
            try:
                view = await self._view()
            except PromptTooLong:  # for the memory's own generation
                return FinishReason.LENGTH
            said = await self._speak(view)
            if said is None:
                return FinishReason.LENGTH
            turn = self._take_down(said)
            self._past.said(said.message)
            self._turns += 1
            self.answer = said.content
            if not said.stopped:
                return FinishReason.LENGTH
            if not said.calls:
                return FinishReason.ANSWERED
            results = await self._execute(said.calls, turn)
            if self._ends_of_subagents:
                self.ends, self._ends_of_subagents = self._ends_of_subagents, ()
            self._scribe.answered(turn, results)
            self._past.answered(map(self._message, results))
            self._situation.changed(results)
            if reason := self._reason_to_end(results):
                return reason
            if limit is not None and limit.expired():  # and a tool took no notice of that
                return FinishReason.WALL_TIME

    async def _view(self) -> Sequence[Message]:
        memory = self._agent.memory
        return self.messages if isinstance(memory, FullHistory) else await recall(memory, self._past)

    async def _speak(self, view: Sequence[Message], max_tokens: int | None = None) -> Utterance | None:
        async with self._speaking:  # a memory may ask several things at once, but there is one sequence to go on with
            with self._told:
                return await self._speaker.speak(view, max_tokens=max_tokens)

    async def _remember(self, view: Sequence[Message], max_tokens: int | None) -> str:
        require_view(view, self._agent.memory, self._past.exchanges)
        said = await self._speak(view, max_tokens)
        if said is None:
            raise PromptTooLong("The memory's own generation leaves no room for one token.")
        self._take_down(said, remembers=True)
        return said.content

    def _take_down(self, said: Utterance, *, remembers: bool = False) -> int:
        turn = self._scribe.turn(
            said,
            kind="memory" if remembers else "act",
            agent=self._path,
            conversation=self._name,
            policy=self._voice.foreign,
            anchor=self._situation.anchor,
            follows=self.ends,
        )
        self.ends = (turn,)
        return turn

    def _message(self, result: ToolRecord) -> Message:
        """The message that hands a result to the model, its images after its text."""
        message = self._agent.result_message(result.call, result.observation)
        if not result.images:
            return message
        return {**message, "content": joined(message["content"], image_parts(result.images))}

    async def _execute(self, calls: Sequence[ToolCall], turn: int) -> list[ToolRecord]:
        limit = self._agent.max_tool_calls
        allowed = len(calls) if limit is None else max(0, min(len(calls), limit - self._tool_calls))
        results = await self._executor.execute(calls[:allowed], turn=turn)
        self._scribe.trajectory.seconds["tools"] += self._executor.seconds_of_tools(results)
        self._tool_calls += len(calls)
        for result in results:
            invalid = result.failure is not None and result.failure.kind in INVALID_CALL_KINDS
            self._invalid_calls_in_a_row = self._invalid_calls_in_a_row + 1 if invalid else 0
            if self._invalid_calls_in_a_row >= self._agent.max_consecutive_invalid_calls:
                self._too_many_invalid = True  # also if a call after them in the same turn was a good one
        refused = f"Error: not executed, because only {limit} tool calls are allowed."
        return results + [ToolRecord(call, refused) for call in calls[allowed:]]

    def _reason_to_end(self, results: Sequence[ToolRecord]) -> FinishReason | None:
        agent = self._agent
        if any(result.done for result in results):
            self.answer = "\n".join(result.observation for result in results if result.done)
            return FinishReason.DONE
        if self._too_many_invalid:
            return FinishReason.INVALID_CALLS
        if agent.max_tool_calls is not None and self._tool_calls > agent.max_tool_calls:
            return FinishReason.MAX_TOOL_CALLS
        if self._turns >= agent.max_turns:
            return FinishReason.MAX_TURNS
        return None

    async def _delegate(self, tool: Subagent, call: ToolCall) -> ToolRecord:
        """Have a subagent answer a call in a conversation of its own."""
        async with self._context.call() as call_context:
            prompt = await tool.prompt(call.arguments or {}, call_context, cut=self._voice.cut)
        name = "/".join(filter(None, (self._name, call.id)))
        part = Conversation(
            self._voice.subagents[tool.name],
            [prompt],
            scribe=self._scribe,
            context=self._context,
            sampling=self._sampling,
            generation=self._generation,
            go_on=self._go_on,
            agent="/".join(filter(None, (self._path, tool.name))),
            name=name,
            follows=self.ends,
        )
        self._scribe.trajectory.subagents[name] = part.messages
        try:
            finish = await part.play()
        except ConversationRefused as error:
            return ToolRecord(call, f"Error: {tool.name} had no answer: {error}", failure=Failure.of(error))
        finally:
            part._voice.forget(part._rollout_id)
        if part.ends != self.ends:  # it has taken a turn
            self._ends_of_subagents += part.ends
        if finish in (FinishReason.ANSWERED, FinishReason.DONE):
            return ToolRecord(call, self._voice.cut(part.answer, tool.max_output_tokens))
        unfinished = SubagentUnfinished(f"{tool.name} had no answer when it ended: {finish}.")
        return ToolRecord(call, f"Error: {unfinished}", failure=Failure.of(unfinished))
