"""Rollout: one attempt of an agent at a task, from the first prompt to the score."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import AnyReward
from agentfly.contexts.context import Context, WaitObserver, no_observer
from agentfly.core.errors import ConversationRefused
from agentfly.core.events import EventStream, RolloutFinished, RolloutStarted
from agentfly.core.signals import should_propagate
from agentfly.core.task import Task
from agentfly.core.trajectory import Failure, FinishReason, Trajectory
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.spec import ResourceSpec
from agentfly.rollouts.agent_loop import NO_SCOPE, AgentLoop
from agentfly.rollouts.agent_runtime import AgentRuntime, SamplingOverride, keep_sampling
from agentfly.rollouts.scoring import score_rollout
from agentfly.rollouts.trajectory_recorder import TrajectoryRecorder


@dataclass(frozen=True)
class RunnerDependencies:
    """What all rollouts of a runner share."""

    runtime: AgentRuntime
    engine: ResourceEngine
    reward: AnyReward | None
    events: EventStream

    @property
    def agent(self) -> Agent:
        """The agent."""
        return self.runtime.agent

    def resources_for(self, task: Task) -> list[ResourceSpec[Any]]:
        """Return the resources that the tools and the reward declare for a task.

        Raises:
            UsageError: a function that declares resources failed for this task.
        """
        return [*self.agent.resources_for(task), *(self.reward.resources_for(task) if self.reward is not None else ())]


class Rollout:
    """One attempt of an agent at a task.

    A failure ends only this rollout, and its trajectory records it. Resources are always released. Only a cancellation
    is raised, even if a tool, a reward or a policy has caught it.

    Args:
        dependencies: what all rollouts share.
        trajectory: the trajectory to fill, with its ids and task.
        sampling: changes how the policy samples.
        priority: priority of this rollout's requests for resources; higher goes first.
        wait_observer: informed of this rollout's waits for resources.
        generation: a context manager, entered while the main agent's policy generates.
        cancelled: returns whether the rollout was cancelled, so that its result no longer counts.
    """

    def __init__(
        self,
        dependencies: RunnerDependencies,
        trajectory: Trajectory,
        *,
        sampling: SamplingOverride = keep_sampling,
        priority: int = 0,
        wait_observer: WaitObserver = no_observer,
        generation: AbstractContextManager[None] = NO_SCOPE,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._generation = generation
        self._dependencies = dependencies
        self._is_cancelled = cancelled
        self._started = time.perf_counter()
        self._closing: asyncio.Task[None] | None = None
        self._finished = False
        self._sampling = sampling
        self._context = Context(trajectory, dependencies.engine, priority=priority, wait_observer=wait_observer)
        self.trajectory = trajectory

    async def run(self) -> Trajectory:
        """Run the agent, score the result, and release all resources."""
        trajectory, events = self.trajectory, self._dependencies.events
        self._started = time.perf_counter()
        trajectory.seconds = {"generation": 0.0, "tools": 0.0, "reward": 0.0}
        events.emit(
            RolloutStarted(rollout_id=trajectory.rollout_id, group_id=trajectory.group_id, task_id=trajectory.task.id)
        )
        try:
            await self._run_agent()
            self._raise_if_cancelled()
            await score_rollout(trajectory, self._dependencies.reward, self._context, events)
            self._raise_if_cancelled()
        except asyncio.CancelledError:
            self._mark_cancelled()
            raise
        finally:
            await self._end()
        return trajectory

    async def abandon(self) -> None:
        """Release all resources of a rollout that does not end. Its result no longer counts."""
        if not self._finished:
            self._mark_cancelled()
        await self._end()

    def _mark_cancelled(self) -> None:
        trajectory = self.trajectory
        trajectory.finish_reason = FinishReason.CANCELLED
        trajectory.reward = trajectory.failure = trajectory.reward_failure = None

    def _raise_if_cancelled(self) -> None:
        if self._is_cancelled():  # and user code has caught the cancellation
            raise asyncio.CancelledError

    async def _end(self) -> None:
        """Release all resources once, even if the waiting task is cancelled several times."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._context.close())
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self._mark_cancelled()
            raise
        finally:
            self._finish()

    def _finish(self) -> None:
        """Emit the final event, once. From here on the rollout has ended and cannot be cancelled."""
        if self._finished:
            return
        self._finished = True
        trajectory = self.trajectory
        trajectory.seconds["waiting"] = self._context.waited_seconds
        trajectory.seconds["total"] = time.perf_counter() - self._started
        self._dependencies.events.emit(_finished_event(trajectory))
        self._dependencies.runtime.release_rollout(trajectory.rollout_id)

    async def _run_agent(self) -> None:
        trajectory, task = self.trajectory, asyncio.current_task()
        recorder = TrajectoryRecorder(trajectory, self._dependencies.events)
        try:
            self._context.declare_resources(self._dependencies.resources_for(trajectory.task))
            conversation = AgentLoop(
                self._dependencies.runtime,
                trajectory.task.messages,
                recorder=recorder,
                context=self._context,
                sampling=self._sampling,
                generation=self._generation,
                go_on=self._raise_if_cancelled,
            )
            trajectory.messages = conversation.messages
            try:
                trajectory.finish_reason = await conversation.run()
            except ConversationRefused as error:
                trajectory.finish_reason, trajectory.failure = FinishReason.FAILED, Failure.of(error)
            recorder.finish()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a policy's library that would end the process ends its rollout
            if should_propagate(error, task):
                raise
            trajectory.finish_reason = FinishReason.FAILED
            trajectory.failure = Failure.of(error)


def _finished_event(trajectory: Trajectory) -> RolloutFinished:
    failure = trajectory.failure or trajectory.reward_failure
    return RolloutFinished(
        rollout_id=trajectory.rollout_id,
        group_id=trajectory.group_id,
        finish_reason=trajectory.finish_reason or FinishReason.FAILED,
        reward=trajectory.reward,
        turns=len(trajectory.turns),
        sampled_tokens=sum(sequence.sampled_count for sequence in trajectory.sequences),
        seconds=trajectory.seconds["total"],
        error=f"{failure.kind}: {failure.message}" if failure else None,
    )
