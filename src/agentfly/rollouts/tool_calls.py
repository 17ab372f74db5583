"""The tool calls of one turn: executed at the same time, answered in order."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from agentfly.agents.agent import Agent
from agentfly.agents.excerpt import Cut
from agentfly.agents.subagent import Subagent
from agentfly.agents.together import together
from agentfly.contexts.context import Context
from agentfly.errors import InvalidArguments, ToolError, UnknownTool, message_of
from agentfly.events import EventStream, ToolFinished
from agentfly.messages import ToolCall
from agentfly.trajectory import Failure, ToolRecord

INVALID_CALL_KINDS = frozenset({InvalidArguments.__name__, UnknownTool.__name__})
"""Failures of calls that could not be executed at all."""

Delegate = Callable[[Subagent, ToolCall], Awaitable[ToolRecord]]
"""Has a subagent answer a call."""


class Executor:
    """Executes the tool calls of one conversation.

    Args:
        agent: has the tools.
        context: the rollout's context.
        events: where events go.
        cut: cuts observations that are too long.
        delegate: answers the calls of subagents.
    """

    def __init__(self, agent: Agent, context: Context, events: EventStream, cut: Cut, delegate: Delegate) -> None:
        self._agent = agent
        self._context = context
        self._events = events
        self._cut = cut
        self._delegate = delegate
        self._subagents = {tool.name for tool in agent.tools if isinstance(tool, Subagent)}

    async def execute(self, calls: Sequence[ToolCall], *, turn: int) -> list[ToolRecord]:
        """Execute the calls of a turn concurrently; the results come in the order of the calls.

        What the policy can cause (an unknown tool, bad arguments, an error in the tool) becomes the observation of its
        call. What it cannot cause is raised, and cancels the other calls of the turn.

        Raises:
            AgentFlyError: a failure of infrastructure, for instance a resource that could not be had.
        """
        if len(calls) == 1:
            return [await self._execute(calls[0], turn)]
        return await together(self._execute(call, turn) for call in calls)

    def seconds_of_tools(self, results: Sequence[ToolRecord]) -> float:
        """How long the tools of a turn took, which ran at the same time; what subagents took is not counted."""
        return max((result.seconds for result in results if result.call.name not in self._subagents), default=0.0)

    async def _execute(self, call: ToolCall, turn: int) -> ToolRecord:
        started = time.perf_counter()
        try:
            record = await self._outcome(call, started)
        except ToolError as error:
            record = ToolRecord(
                call, f"Error: {message_of(error)}", failure=Failure.of(error), seconds=time.perf_counter() - started
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
            result = await tool.call(call.arguments, call_context, cut=self._cut)
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
