"""Runner: many rollouts at once, each waiting only for itself."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import AnyReward
from agentfly.agents.tool import Tool
from agentfly.errors import AgentFlyError, ConfigError, UsageError
from agentfly.events import EventStream
from agentfly.policies.load import load_policy
from agentfly.policies.policy import ChatPolicy, Policy, SamplingParams
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.instances.attendance import Occupancy
from agentfly.rollouts.admission import Admission
from agentfly.rollouts.foresight import Foresight
from agentfly.rollouts.rollout import Rollout, Surroundings
from agentfly.rollouts.voice import Voice, require_strategy, unchanged
from agentfly.task import Task
from agentfly.trajectory import Failure, FinishReason, Trajectory


class TooManyFailures(AgentFlyError):
    """So many rollouts failed for reasons the policy could not cause that going on would be a waste."""


def require_agent(agent: object) -> None:
    """Raise unless ``agent`` is an `Agent`: a function that makes one, or a tool, is easily taken for it.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(agent, Agent):
        return
    if isinstance(agent, Tool):
        raise UsageError(f"{agent.name} is a tool, not an agent. Pass an Agent that has it: Agent(tools=[…]).")
    name = getattr(agent, "__name__", None)
    if callable(agent) and name:
        raise UsageError(f"{name} is not an Agent. If it makes one, call it and pass an Agent, e.g. {name}('tiny').")
    raise UsageError(f"A {type(agent).__name__} is not an Agent. Pass an Agent, e.g. Agent(model='tiny').")


class Runner:
    """Runs rollouts of one agent concurrently, in one process.

    ``async with Runner(agent) as runner: trajectories = await runner.collect(tasks, attempts=8)``

    A policy or engine that is given belongs to the caller, who enters and leaves it; one that is not given is made,
    and released when the runner is left.

    Args:
        agent: the agent.
        policy: where tokens come from; made from ``agent.model`` if not given.
        engine: schedules the resources; made if not given.
        reward: scores the finished rollouts; without one, the sum of the tools' rewards is the score.
        events: where events go.
        max_concurrent_rollouts: how many rollouts run at a time; the others wait their turn, in order, and also while
            those that run wait for resources (see `Admission`).
        strategy: how turns become token sequences: ``"chain"``, one that grows as long as the conversation does, or
            ``"step"``, one for each turn.
        max_failure_share: the run stops once more than this share of a batch failed for infrastructure's reasons.

    Raises:
        UsageError: ``agent`` is not an `Agent`.
    """

    def __init__(
        self,
        agent: Agent,
        *,
        policy: Policy | ChatPolicy | None = None,
        engine: ResourceEngine | None = None,
        reward: AnyReward | None = None,
        events: EventStream | None = None,
        strategy: str = "chain",
        max_concurrent_rollouts: int = 256,
        max_failure_share: float = 0.5,
    ) -> None:
        require_agent(agent)
        if max_concurrent_rollouts < 1:
            raise ConfigError(f"max_concurrent_rollouts={max_concurrent_rollouts}: at least one rollout must run.")
        self._agent = agent
        self._policy = policy
        self._engine = engine
        self._reward = reward
        self._events = events or EventStream()
        require_strategy(strategy)
        self._strategy = strategy
        self._max_concurrent = max_concurrent_rollouts
        self._max_failure_share = max_failure_share
        self._owned = AsyncExitStack()
        self._around: Surroundings | None = None

    async def __aenter__(self) -> Self:
        try:
            policy, engine = self._policy, self._engine
            if policy is None:
                loaded = await asyncio.to_thread(load_policy, self._agent.model)
                policy = await self._owned.enter_async_context(loaded)
            if engine is None:
                engine = await self._owned.enter_async_context(ResourceEngine(events=self._events))
            voice = Voice.of(self._agent, policy, strategy=self._strategy)
        except BaseException:
            await self._owned.aclose()
            raise
        self._around = Surroundings(voice, engine, self._reward, self._events)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._around = None
        await self._owned.aclose()

    def occupancy(self) -> dict[str, Occupancy]:
        """How much the engine's instances were leased and used so far, by the labels of their specs."""
        return self._require_entered().engine.occupancy()

    async def collect(self, tasks: Sequence[Task], **settings: Any) -> list[Trajectory]:
        """All trajectories, in the order of the tasks and attempts. Settings: as of `stream`."""
        trajectories = [trajectory async for trajectory in self.stream(tasks, **settings)]
        return sorted(trajectories, key=lambda t: (_task_index(t), t.attempt))

    async def stream(
        self,
        tasks: Sequence[Task],
        *,
        attempts: int = 1,
        sampling: Callable[[SamplingParams], SamplingParams] | None = None,
        label: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Trajectory]:
        """Trajectories as they finish. Leaving the iteration cancels what still runs and gives its resources back.

        Args:
            tasks: the tasks.
            attempts: rollouts a task; they form a group.
            sampling: changes the agent's sampling, for instance ``lambda s: replace(s, temperature=0.0)``.
            label: begins the ids of the rollouts. Rollouts of the same label, task and attempt sample the same tokens
                from a seeded policy, so a label must not be in use twice at a time. Made at random if not given.
            priority: of the rollouts' requests for resources; higher goes first.

        Raises:
            TooManyFailures: more than ``max_failure_share`` of the batch, or all of it, was spoiled by infrastructure.
        """
        if attempts < 1:
            raise ConfigError(f"attempts={attempts}: a task needs at least one attempt.")
        around = self._require_entered()
        label = label or uuid.uuid4().hex[:8]
        finished: asyncio.Queue[asyncio.Task[Trajectory]] = asyncio.Queue()
        admission = Admission(self._max_concurrent)
        foresight = Foresight(around, tasks)

        stopping = False

        async def play(index: int, task: Task, attempt: int) -> Trajectory:
            group_id = f"{label}-{index}"
            async with admission.turn() as guest:
                foresight.begins(index)
                trajectory = Trajectory(f"{group_id}.{attempt}", group_id, task, attempt)
                try:
                    rollout = Rollout(
                        around, trajectory, sampling=sampling or unchanged, priority=priority, notice=guest.notice
                    )
                    return await rollout.run()
                except asyncio.CancelledError as error:
                    if stopping:
                        raise
                    trajectory.finish = FinishReason.FAILED  # something in the rollout cancelled it from within
                    trajectory.failure = Failure.of(error)
                    return trajectory

        running = set()
        try:
            for index, task in enumerate(tasks):
                for attempt in range(attempts):
                    rollout = asyncio.create_task(play(index, task, attempt))
                    rollout.add_done_callback(finished.put_nowait)
                    running.add(rollout)
            health = _Health(self._max_failure_share, len(running))
            while running:
                rollout = await finished.get()
                running.discard(rollout)
                trajectory = rollout.result()
                health.count(trajectory)
                yield trajectory
            health.require_any_sound()
        finally:
            stopping = True
            for rollout in running:
                rollout.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _require_entered(self) -> Surroundings:
        if self._around is None:
            raise UsageError("The runner is not open. Use it as `async with Runner(agent) as runner: …`.")
        return self._around


class _Health:
    """Counts what infrastructure spoiled of a batch, and stops a run that has lost too much of it."""

    def __init__(self, max_failure_share: float, batch: int) -> None:
        self._limit = max_failure_share * batch
        self._ended = 0
        self._kinds: Counter[str] = Counter()
        self._examples: dict[str, Failure] = {}

    def count(self, trajectory: Trajectory) -> None:
        self._ended += 1
        if trajectory.infrastructure_failed:
            failure = next(f for f in (trajectory.failure, trajectory.reward_failure) if f and not f.by_policy)
            self._kinds[failure.kind] += 1
            self._examples.setdefault(failure.kind, failure)
        if self._kinds.total() > self._limit:
            raise self._error()

    def require_any_sound(self) -> None:
        """Called when all rollouts have ended: a run in which not one was sound has no result to return."""
        if self._ended and self._kinds.total() == self._ended:
            raise self._error()

    def _error(self) -> TooManyFailures:
        kind, count = self._kinds.most_common(1)[0]
        example = self._examples[kind]
        place = f" (raised at {example.place})" if example.place else ""
        return TooManyFailures(
            f"{self._kinds.total()} of {self._ended} rollouts failed for reasons that the policy could not cause; "
            f"stopping. The most frequent was {kind} ({count} times), for instance: "
            f"{example.message}{place}"
        )


def _task_index(trajectory: Trajectory) -> int:
    return int(trajectory.group_id.rpartition("-")[2])
