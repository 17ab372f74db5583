"""The tool calls of one turn: executed at the same time, answered in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from agentfly.agents.agent import Agent
from agentfly.agents.excerpt import Cut, cut_by_characters
from agentfly.contexts.context import Context
from agentfly.errors import InvalidArguments, ToolError, UnknownTool, message_of
from agentfly.events import EventStream, ToolFinished
from agentfly.messages import ToolCall
from agentfly.trajectory import Failure, ToolRecord

INVALID_CALL_KINDS = frozenset({InvalidArguments.__name__, UnknownTool.__name__})
"""Failures of calls that could not be executed at all."""


async def execute_calls(
    calls: Sequence[ToolCall],
    agent: Agent,
    context: Context,
    events: EventStream,
    *,
    turn: int,
    cut: Cut = cut_by_characters,
) -> list[ToolRecord]:
    """Execute the calls of a turn concurrently; the results come in the order of the calls.

    What the policy can cause (an unknown tool, bad arguments, an error in the tool) becomes the observation of its
    call. What it cannot cause is raised, and cancels the other calls of the turn.

    Raises:
        AgentFlyError: a failure of infrastructure, for instance a resource that could not be had.
    """
    if len(calls) == 1:
        return [await _execute(calls[0], agent, context, events, turn, cut)]
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(_execute(call, agent, context, events, turn, cut)) for call in calls]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in running]


async def _execute(
    call: ToolCall, agent: Agent, context: Context, events: EventStream, turn: int, cut: Cut
) -> ToolRecord:
    started = time.perf_counter()
    record = await _outcome(call, agent, context, cut)
    seconds = time.perf_counter() - started
    error = record.failure.kind if record.failure else None
    events.emit(ToolFinished(rollout_id=context.rollout_id, turn=turn, tool=call.name, seconds=seconds, error=error))
    return replace(record, seconds=seconds)


async def _outcome(call: ToolCall, agent: Agent, context: Context, cut: Cut) -> ToolRecord:
    try:
        if call.error is not None or call.arguments is None:
            raise InvalidArguments(call.error or "The call has no arguments.")
        tool = agent.tool(call.name)
        async with context.call() as call_context:
            result = await tool.call(call.arguments, call_context, cut=cut)
    except ToolError as error:
        return ToolRecord(call, f"Error: {message_of(error)}", failure=Failure.of(error))
    return ToolRecord(
        call,
        result.observation,
        result.reward,
        result.done,
        result.state,
        dict(result.info),
        images=result.images,
    )
