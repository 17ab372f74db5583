"""Rollout: one attempt of an agent at a task, from the first prompt to the score."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import AnyReward
from agentfly.contexts.context import Context, Notice, unnoticed
from agentfly.events import EventStream, GenerationFinished, RolloutFinished, RolloutStarted
from agentfly.messages import Message, ToolCall
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.spec import ResourceSpec
from agentfly.rollouts.scoring import score_rollout
from agentfly.rollouts.speaker import Utterance
from agentfly.rollouts.tape import NO_PLACE
from agentfly.rollouts.tool_calls import INVALID_CALL_KINDS, execute_calls
from agentfly.rollouts.voice import ChangeOfSampling, Voice, unchanged
from agentfly.task import Task
from agentfly.trajectory import Failure, FinishReason, ToolRecord, Trajectory, Turn


@dataclass(frozen=True)
class Surroundings:
    """What all rollouts of a runner share."""

    voice: Voice
    engine: ResourceEngine
    reward: AnyReward | None
    events: EventStream

    @property
    def agent(self) -> Agent:
        """The agent."""
        return self.voice.agent

    def needs(self, task: Task) -> list[ResourceSpec[Any]]:
        """The resources that the tools and the reward have declared for a task.

        Raises:
            UsageError: a function that says so failed for this task.
        """
        return [*self.agent.needs(task), *(self.reward.needs(task) if self.reward is not None else ())]


class Rollout:
    """One attempt of an agent at a task.

    Everything that goes wrong inside ends this rollout only, and is typed in its trajectory; resources go back however
    it ends. Only cancellation is raised.

    Args:
        surroundings: what all rollouts share.
        trajectory: the record to fill, with its ids and task.
        sampling: changes how the agent samples.
        priority: of this rollout's requests for resources; higher goes first.
        notice: told of this rollout's waits for resources.
    """

    def __init__(
        self,
        surroundings: Surroundings,
        trajectory: Trajectory,
        *,
        sampling: ChangeOfSampling = unchanged,
        priority: int = 0,
        notice: Notice = unnoticed,
    ) -> None:
        self._around = surroundings
        self._agent = surroundings.agent
        self._speaker = surroundings.voice.speaker(trajectory.sequences, trajectory.rollout_id, sampling)
        self._context = Context(trajectory, surroundings.engine, priority=priority, notice=notice)
        self._tool_calls = 0
        self._invalid_calls_in_a_row = 0
        self.trajectory = trajectory

    async def run(self) -> Trajectory:
        """Play the turns, score the result, and give everything back."""
        trajectory, events = self.trajectory, self._around.events
        started = time.perf_counter()
        trajectory.seconds = {"generation": 0.0, "tools": 0.0, "reward": 0.0}
        events.emit(
            RolloutStarted(rollout_id=trajectory.rollout_id, group_id=trajectory.group_id, task_id=trajectory.task.id)
        )
        try:
            await self._play()
            await score_rollout(trajectory, self._around.reward, self._context, events)
        except asyncio.CancelledError:
            trajectory.finish = FinishReason.CANCELLED
            raise
        finally:
            try:
                await asyncio.shield(self._context.close())
            finally:  # also if it is cancelled again
                trajectory.seconds["waiting"] = self._context.waited_seconds
                trajectory.seconds["total"] = time.perf_counter() - started
                events.emit(_finished_event(trajectory))
                self._around.voice.forget(trajectory.rollout_id)
        return trajectory

    async def _play(self) -> None:
        trajectory = self.trajectory
        try:
            trajectory.finish = await self._play_within_wall_time()
            self._speaker.finish()
        except Exception as error:
            trajectory.finish = FinishReason.FAILED
            trajectory.failure = Failure.of(error)

    async def _play_within_wall_time(self) -> FinishReason:
        limit = asyncio.timeout(self._agent.max_wall_seconds)
        try:
            async with limit:
                return await self._turns()
        except TimeoutError:
            if limit.expired():
                return FinishReason.WALL_TIME
            raise

    async def _turns(self) -> FinishReason:
        trajectory = self.trajectory
        self._context.declare(self._around.needs(trajectory.task))
        trajectory.messages = self._opening()
        while True:
            said = await self._speaker.speak(trajectory.messages)
            if said is None:
                return FinishReason.LENGTH
            turn = self._record(said)
            if not said.stopped:
                return FinishReason.LENGTH
            if not said.calls:
                return FinishReason.ANSWERED
            results = await self._execute(said.calls, turn.index)
            trajectory.turns[-1] = replace(turn, results=tuple(results))
            answers = [self._agent.result_message(result.call, result.observation) for result in results]
            trajectory.messages.extend(answers)
            if reason := self._reason_to_end(results):
                return reason

    def _opening(self) -> list[Message]:
        messages = self.trajectory.task.messages
        system = self._agent.system_message()
        return [{"role": "system", "content": system}, *messages] if system else messages

    def _record(self, said: Utterance) -> Turn:
        trajectory, place = self.trajectory, said.place or NO_PLACE
        turn = Turn(
            index=len(trajectory.turns),
            sequence=place.sequence,
            start=place.start,
            stop=place.stop,
            text=said.text,
            stopped=said.stopped,
            generation_seconds=said.seconds,
            reasoning=said.reasoning,
        )
        trajectory.turns.append(turn)
        trajectory.messages.append(said.message)
        trajectory.seconds["generation"] += said.seconds
        self._around.events.emit(
            GenerationFinished(
                rollout_id=trajectory.rollout_id,
                turn=turn.index,
                prompt_tokens=said.prompt_tokens,
                sampled_tokens=place.stop - place.start,
                seconds=said.seconds,
            )
        )
        return turn

    async def _execute(self, calls: Sequence[ToolCall], turn: int) -> list[ToolRecord]:
        limit = self._agent.max_tool_calls
        allowed = len(calls) if limit is None else max(0, min(len(calls), limit - self._tool_calls))
        started = time.perf_counter()
        cut = self._around.voice.cut
        results = await execute_calls(
            calls[:allowed], self._agent, self._context, self._around.events, turn=turn, cut=cut
        )
        self.trajectory.seconds["tools"] += time.perf_counter() - started
        self._tool_calls += len(calls)
        for result in results:
            invalid = result.failure is not None and result.failure.kind in INVALID_CALL_KINDS
            self._invalid_calls_in_a_row = self._invalid_calls_in_a_row + 1 if invalid else 0
        refused = f"Error: not executed, because only {limit} tool calls are allowed."
        return results + [ToolRecord(call, refused) for call in calls[allowed:]]

    def _reason_to_end(self, results: Sequence[ToolRecord]) -> FinishReason | None:
        agent = self._agent
        if any(result.done for result in results):
            return FinishReason.DONE
        if self._invalid_calls_in_a_row >= agent.max_consecutive_invalid_calls:
            return FinishReason.INVALID_CALLS
        if agent.max_tool_calls is not None and self._tool_calls > agent.max_tool_calls:
            return FinishReason.MAX_TOOL_CALLS
        if len(self.trajectory.turns) >= agent.max_turns:
            return FinishReason.MAX_TURNS
        return None


def _finished_event(trajectory: Trajectory) -> RolloutFinished:
    failure = trajectory.failure or trajectory.reward_failure
    return RolloutFinished(
        rollout_id=trajectory.rollout_id,
        group_id=trajectory.group_id,
        finish=trajectory.finish or FinishReason.FAILED,
        reward=trajectory.reward,
        turns=len(trajectory.turns),
        sampled_tokens=sum(sequence.sampled_count for sequence in trajectory.sequences),
        seconds=trajectory.seconds["total"],
        error=f"{failure.kind}: {failure.message}" if failure else None,
    )
