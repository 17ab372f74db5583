"""The loop of one agent in a rollout: generate a turn, execute its tool calls, repeat until an answer or a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from agentfly.agents.agent import Agent, Subagent
from agentfly.agents.memory import FullHistory, Past, recall_view, validate_view
from agentfly.contexts.context import Context
from agentfly.core.async_tasks import gather_or_raise
from agentfly.core.errors import (
    ConversationRefused,
    InvalidArguments,
    PromptTooLong,
    SubagentUnfinished,
    ToolError,
    UnknownTool,
    error_message,
)
from agentfly.core.events import EventStream, ToolFinished
from agentfly.core.messages import Message, ToolCall, concat_content, image_parts
from agentfly.core.trajectory import Failure, FinishReason, ToolRecord
from agentfly.core.truncation import Truncate
from agentfly.rollouts.agent_runtime import AgentRuntime, SamplingOverride
from agentfly.rollouts.trajectory_recorder import AnchorState, TrajectoryRecorder
from agentfly.rollouts.turn_generator import AssistantTurn

INVALID_CALL_KINDS = frozenset({InvalidArguments.__name__, UnknownTool.__name__})
"""Failures of calls that could not be executed at all."""

RunSubagent = Callable[[Subagent, ToolCall], Awaitable[ToolRecord]]
"""Runs a subagent to answer a call."""


class ToolExecutor:
    """Executes the tool calls of one conversation.

    Args:
        agent: the agent whose tools are called.
        context: the rollout's context.
        events: receives an event for each finished call.
        truncate: truncates observations that are too long.
        delegate: answers the calls of subagents.
    """

    def __init__(
        self, agent: Agent, context: Context, events: EventStream, truncate: Truncate, delegate: RunSubagent
    ) -> None:
        self._agent = agent
        self._context = context
        self._events = events
        self._truncate = truncate
        self._delegate = delegate
        self._subagents = {tool.name for tool in agent.tools if isinstance(tool, Subagent)}

    async def execute(self, calls: Sequence[ToolCall], *, turn: int) -> list[ToolRecord]:
        """Execute the calls of a turn concurrently. Return the results in the order of the calls.

        A failure that the policy can cause becomes the observation of its call: an unknown tool, bad arguments, an
        error in the tool. Any other failure is raised and cancels the other calls of the turn.

        Raises:
            AgentFlyError: infrastructure failed, for instance a resource could not be acquired.
        """
        if len(calls) == 1:
            return [await self._execute(calls[0], turn)]
        return await gather_or_raise(self._execute(call, turn) for call in calls)

    def tool_seconds(self, results: Sequence[ToolRecord]) -> float:
        """Return the seconds that a turn's concurrent tools took together. Subagents are not counted."""
        return max((result.seconds for result in results if result.call.name not in self._subagents), default=0.0)

    async def _execute(self, call: ToolCall, turn: int) -> ToolRecord:
        started = time.perf_counter()
        try:
            record = await self._outcome(call, started)
        except ToolError as error:
            record = ToolRecord(
                call, f"Error: {error_message(error)}", failure=Failure.of(error), seconds=time.perf_counter() - started
            )
        self._events.emit(
            ToolFinished(
                rollout_id=self._context.rollout_id,
                turn=turn,
                tool=call.name,
                seconds=record.seconds,
                error=record.failure.kind if record.failure else None,
            )
        )
        return record

    async def _outcome(self, call: ToolCall, started: float) -> ToolRecord:
        if call.error is not None or call.arguments is None:
            raise InvalidArguments(call.error or "The call has no arguments.")
        tool = self._agent.tool(call.name)
        if isinstance(tool, Subagent):
            return replace(await self._delegate(tool, call), seconds=time.perf_counter() - started)
        async with self._context.call() as call_context:
            result = await tool.call(call.arguments, call_context, truncate=self._truncate)
        return ToolRecord(
            call=call,
            observation=result.observation,
            reward=result.reward,
            done=result.done,
            state=result.state,
            info=dict(result.info),
            images=result.images,
            seconds=time.perf_counter() - started,
        )


NO_SCOPE: AbstractContextManager[None] = nullcontext()
"""A block that reports nothing."""


class AgentLoop:
    """One agent's part in a rollout.

    Args:
        runtime: the agent with its policy and chat format.
        asked: the messages of the task, or of the call that the agent answers.
        recorder: records the rollout's turns.
        context: the rollout's context.
        sampling: changes how the rollout's own policy samples.
        generation: a context manager, entered while the rollout's own policy generates.
        go_on: called before each turn. An error that it raises ends the conversation.
        agent: path of the agent's name; empty for the main agent.
        name: name of the conversation: the ids of the calls that led to it, joined by ``/``; empty for the main one.
        parent_turns: the turns that led to it; see `agentfly.core.trajectory.Turn.parent_turns`.

    Attributes:
        messages: the conversation.
        answer: content of the agent's last turn. If a tool ended the conversation, the observation of that tool.
        last_turns: the parents of the next turn: the agent's last turn, or the last turns of the subagents that
            answered it.
    """

    def __init__(
        self,
        runtime: AgentRuntime,
        asked: Sequence[Message],
        *,
        recorder: TrajectoryRecorder,
        context: Context,
        sampling: SamplingOverride,
        generation: AbstractContextManager[None] = NO_SCOPE,
        go_on: Callable[[], None] = lambda: None,
        agent: str = "",
        name: str = "",
        parent_turns: tuple[int, ...] = (),
    ) -> None:
        system = runtime.agent.system_message()
        self.messages: list[Message] = [{"role": "system", "content": system}, *asked] if system else [*asked]
        self.answer = ""
        self.last_turns = parent_turns
        self._ends_of_subagents: tuple[int, ...] = ()
        self._runtime = runtime
        self._agent = runtime.agent
        self._recorder = recorder
        self._context = context
        self._sampling = sampling
        self._go_on = go_on
        self._generation = generation
        self._scope = NO_SCOPE if runtime.other_model else generation
        self._path = agent
        self._name = name
        self._generator = runtime.turn_generator(recorder.trajectory.sequences, self._rollout_id, sampling)
        recorder.add_generator(self._generator)
        self._generating = asyncio.Lock()
        self._past = Past(self.messages, context, self._remember, self._generator.count_tokens)
        self._anchor_state = AnchorState(self.messages)
        self._executor = ToolExecutor(self._agent, context, recorder.events, runtime.truncate, self._delegate)
        self._turns = self._tool_calls = self._invalid_calls_in_a_row = 0
        self._too_many_invalid = False

    @property
    def _rollout_id(self) -> str:
        """The conversation's id for the policy."""
        return "/".join(filter(None, (self._recorder.trajectory.rollout_id, self._name)))

    async def run(self) -> FinishReason:
        """Take turns until the agent has answered, a tool reports that the task is done, or a limit is reached."""
        if self._agent.max_wall_seconds is None:
            return await self._take_turns()
        limit = asyncio.timeout(self._agent.max_wall_seconds)
        try:
            async with limit:
                return await self._take_turns(limit)
        except TimeoutError:
            if limit.expired():
                return FinishReason.WALL_TIME
            raise

    def release(self) -> None:
        """Let the policy discard what it keeps for this conversation."""
        self._runtime.release_rollout(self._rollout_id)

    async def _take_turns(self, limit: asyncio.Timeout | None = None) -> FinishReason:
        while True:
            self._go_on()
            try:
                view = await self._view()
            except PromptTooLong:  # for the memory's own generation
                return FinishReason.LENGTH
            generated = await self._generate(view)
            if generated is None:
                return FinishReason.LENGTH
            turn = self._record_turn(generated)
            self._past.append_turn(generated.message)
            self._turns += 1
            self.answer = generated.content
            if not generated.ended_by_model:
                return FinishReason.LENGTH
            if not generated.calls:
                return FinishReason.ANSWERED
            results = await self._execute(generated.calls, turn)
            if self._ends_of_subagents:
                self.last_turns, self._ends_of_subagents = self._ends_of_subagents, ()
            self._recorder.record_results(turn, results)
            self._past.append_results(map(self._message, results))
            self._anchor_state.update(results)
            if reason := self._reason_to_end(results):
                return reason
            if limit is not None and limit.expired():  # a tool ignored the cancellation
                return FinishReason.WALL_TIME

    async def _view(self) -> Sequence[Message]:
        memory = self._agent.memory
        return self.messages if isinstance(memory, FullHistory) else await recall_view(memory, self._past)

    async def _generate(self, view: Sequence[Message], max_tokens: int | None = None) -> AssistantTurn | None:
        async with self._generating:  # a memory may ask for several generations at once, but there is one sequence
            with self._scope:
                return await self._generator.generate_turn(view, max_tokens=max_tokens)

    async def _remember(self, view: Sequence[Message], max_tokens: int | None) -> str:
        validate_view(view, self._agent.memory, self._past.exchanges)
        generated = await self._generate(view, max_tokens)
        if generated is None:
            raise PromptTooLong("The prompt of the memory's own generation leaves no room for one token.")
        self._record_turn(generated, remembers=True)
        return generated.content

    def _record_turn(self, generated: AssistantTurn, *, remembers: bool = False) -> int:
        turn = self._recorder.record_turn(
            generated,
            kind="memory" if remembers else "act",
            agent=self._path,
            conversation=self._name,
            other_model=self._runtime.other_model,
            anchor=self._anchor_state.anchor,
            parent_turns=self.last_turns,
        )
        self.last_turns = (turn,)
        return turn

    def _message(self, result: ToolRecord) -> Message:
        """Return the message that shows a result to the model, its images after its text."""
        message = self._agent.result_message(result.call, result.observation)
        if not result.images:
            return message
        return {**message, "content": concat_content(message["content"], image_parts(result.images))}

    async def _execute(self, calls: Sequence[ToolCall], turn: int) -> list[ToolRecord]:
        limit = self._agent.max_tool_calls
        allowed = len(calls) if limit is None else max(0, min(len(calls), limit - self._tool_calls))
        results = await self._executor.execute(calls[:allowed], turn=turn)
        self._recorder.trajectory.seconds["tools"] += self._executor.tool_seconds(results)
        self._tool_calls += len(calls)
        for result in results:
            invalid = result.failure is not None and result.failure.kind in INVALID_CALL_KINDS
            self._invalid_calls_in_a_row = self._invalid_calls_in_a_row + 1 if invalid else 0
            if self._invalid_calls_in_a_row >= self._agent.max_consecutive_invalid_calls:
                self._too_many_invalid = True  # also if a later call of the same turn is valid
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
        """Run a subagent in its own conversation to answer a call."""
        async with self._context.call() as call_context:
            prompt = await tool.prompt(call.arguments or {}, call_context, truncate=self._runtime.truncate)
        name = "/".join(filter(None, (self._name, call.id)))
        part = AgentLoop(
            self._runtime.subagents[tool.name],
            [prompt],
            recorder=self._recorder,
            context=self._context,
            sampling=self._sampling,
            generation=self._generation,
            go_on=self._go_on,
            agent="/".join(filter(None, (self._path, tool.name))),
            name=name,
            parent_turns=self.last_turns,
        )
        self._recorder.trajectory.subagents[name] = part.messages
        try:
            finish = await part.run()
        except ConversationRefused as error:
            return ToolRecord(call, f"Error: {tool.name} had no answer: {error}", failure=Failure.of(error))
        finally:
            part.release()
        if part.last_turns != self.last_turns:  # the subagent has taken a turn
            self._ends_of_subagents += part.last_turns
        if finish in (FinishReason.ANSWERED, FinishReason.DONE):
            return ToolRecord(call, self._runtime.truncate(part.answer, tool.max_output_tokens))
        unfinished = SubagentUnfinished(f"{tool.name} had no answer when it ended: {finish}.")
        return ToolRecord(call, f"Error: {unfinished}", failure=Failure.of(unfinished))
