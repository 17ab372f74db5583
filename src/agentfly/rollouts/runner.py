"""Runner: runs many rollouts concurrently."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import AnyReward, require_reward
from agentfly.agents.tool import Tool
from agentfly.core.errors import ConfigError, UsageError, reject_unknown_arguments, type_of
from agentfly.core.events import EventStream
from agentfly.core.numbers import require_number, require_whole
from agentfly.core.task import Tasks
from agentfly.core.threads.pool import run_in_thread
from agentfly.core.trajectory import Trajectory
from agentfly.policies.load import load_policy
from agentfly.policies.policy import ChatPolicy, Policy, SamplingParams, max_concurrent_generations_of
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.engine.usage import Occupancy
from agentfly.rollouts.admission import Admission, AdmissionTicket, BlockReason, ConcurrencyStats
from agentfly.rollouts.agent_runtime import NO_POLICIES, AgentRuntime, keep_sampling
from agentfly.rollouts.backlog import Backlog, Prefetcher
from agentfly.rollouts.batch import Batch
from agentfly.rollouts.failure_budget import FailureBudget
from agentfly.rollouts.rollout import Rollout, RunnerDependencies
from agentfly.rollouts.rollout_record import RolloutStore, agent_fingerprint
from agentfly.rollouts.scoring import group_scorer
from agentfly.rollouts.token_recorder import require_strategy

LIMIT_WARNING_FRACTION = 0.25
"""Share of the time blocked by the limit alone from which the runner warns."""

LIMIT_WARNING_MIN_S = 10.0
"""The runner does not warn about shorter runs."""

logger = logging.getLogger(__name__)


def require_agent(agent: object) -> None:
    """Check that ``agent`` is an `Agent`, not a tool or a function that creates an agent.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(agent, Agent):
        return
    if isinstance(agent, Tool):
        raise UsageError(f"{agent.name} is a tool, not an agent. Pass an Agent that has it: Agent(tools=[…]).")
    name = getattr(agent, "__name__", None)
    if callable(agent) and name:
        raise UsageError(f"{name} is not an Agent. If it creates one, call it and pass the Agent, e.g. {name}('tiny').")
    raise UsageError(f"agent is {type_of(agent)}, not an Agent. Pass an Agent, e.g. Agent(model='tiny').")


class BatchSettings(TypedDict, total=False):
    """Settings of a batch of rollouts.

    Attributes:
        attempts: number of rollouts per task; they form a group. 1 if not given.
        sampling: changes the agent's sampling, for instance ``lambda s: replace(s, temperature=0.0)``.
        label: prefix of the rollouts' ids. Rollouts of the same label, task and attempt sample the same tokens from a
            seeded policy, so a label must not be in use twice at the same time. Random if not given.
        priority: rollouts of a higher priority begin, get resources and are sampled first. 0 if not given.
        record: stores finished rollouts, and finds those of an earlier run. Open it before.
        first_group: number of the first group, the last part of its id. 0 if not given.
    """

    attempts: int
    sampling: Callable[[SamplingParams], SamplingParams] | None
    label: str | None
    priority: int
    record: RolloutStore | None
    first_group: int


class RunnerSettings(TypedDict, total=False):
    """The settings of a `Runner` besides its agent and reward; see `Runner` for their meanings."""

    policy: Policy | ChatPolicy | None
    engine: ResourceEngine | None
    events: EventStream | None
    strategy: str
    subagent_policies: Mapping[str, Policy | ChatPolicy]
    max_concurrent_rollouts: int | None
    max_concurrent_starts: int | None
    max_failure_rate: float


class Runner:
    """Runs rollouts of one agent concurrently, in one process.

    ``async with Runner(agent) as runner: trajectories = await runner.collect(tasks, attempts=8)``

    A policy or engine that is passed in belongs to the caller. If it is not given, the runner creates one, and closes
    it when the block is left. A policy that is not in use yet is entered, and closed with the runner.

    Args:
        agent: the agent.
        policy: the source of tokens; created from ``agent.model`` if not given.
        engine: schedules the resources; created if not given.
        reward: scores the finished rollouts; without one, the sum of the tools' rewards is the score.
        events: where events go.
        max_concurrent_rollouts: maximum number of running rollouts; if not given, as many as keep the policy busy and
            fit into memory. Other rollouts wait in order. They also wait while running ones wait for resources (see
            `Admission`).
        max_concurrent_starts: maximum number of resources that start at the same time, for an engine that the runner
            creates (see `ResourceEngine`).
        strategy: how turns become token sequences. ``"chain"`` continues one sequence as long as the conversation
            grows; ``"step"`` begins a new one at each turn.
        subagent_policies: policies of subagents with another model, by the model; created from it if not given. Their
            tokens are not trained on.
        max_failure_rate: a batch stops once the share of infrastructure failures, among all its rollouts or among the
            last ones, exceeds this rate (see `FailureBudget`).

    Raises:
        UsageError: ``agent`` is not an `Agent`, ``reward`` is not a reward, or a policy is not a policy.
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
        subagent_policies: Mapping[str, Policy | ChatPolicy] = NO_POLICIES,
        max_concurrent_rollouts: int | None = None,
        max_concurrent_starts: int | None = None,
        max_failure_rate: float = 0.5,
    ) -> None:
        require_agent(agent)
        if reward is not None:
            require_reward(reward)
        for name, most in (
            ("max_concurrent_rollouts", max_concurrent_rollouts),
            ("max_concurrent_starts", max_concurrent_starts),
        ):
            if most is not None:
                require_whole("Runner", **{name: most})
        require_number("Runner", least=0, most=1, max_failure_rate=max_failure_rate)
        require_engine(engine)
        require_events(events)
        if engine is not None and max_concurrent_starts is not None:
            raise ConfigError(
                f"max_concurrent_starts={max_concurrent_starts} is for an engine that is made here, and engine= is "
                f"given. Write ResourceEngine(max_concurrent_starts={max_concurrent_starts})."
            )
        require_policies(policy, subagent_policies)
        self._agent = agent
        self._policy = policy
        self._engine = engine
        self._reward = reward
        self._events = events or EventStream()
        require_strategy(strategy)
        self._strategy = strategy
        self._subagent_policies = subagent_policies
        self._max_concurrent = max_concurrent_rollouts
        self._max_concurrent_starts = max_concurrent_starts
        self._max_failure_rate = max_failure_rate
        self._owned = AsyncExitStack()
        self._admission: Admission | None = None
        self._batches: set[Batch] = set()
        self._dependencies: RunnerDependencies | None = None

    async def __aenter__(self) -> Self:
        try:
            policy, engine = self._policy, self._engine
            if policy is None:
                policy = await self._load(self._agent.model)
            for given in {id(one): one for one in (policy, *self._subagent_policies.values())}.values():
                if not getattr(given, "in_use", True):  # one that cannot tell is the caller's
                    await self._owned.enter_async_context(given)
            models = {str(one.model): one.model for one in self._agent.subagents if one.model != self._agent.model}
            missing = models.keys() - self._subagent_policies.keys()
            others = {**self._subagent_policies, **{name: await self._load(models[name]) for name in sorted(missing)}}
            if engine is None:
                made = ResourceEngine(events=self._events, max_concurrent_starts=self._max_concurrent_starts)
                engine = await self._owned.enter_async_context(made)
            runtime = AgentRuntime.create(self._agent, policy, strategy=self._strategy, others=others)
        except BaseException:
            await self._owned.aclose()
            raise
        self._dependencies = RunnerDependencies(runtime, engine, self._reward, self._events)
        self._admission = Admission(
            self._max_concurrent,
            generations=max_concurrent_generations_of(policy),
            clock=asyncio.get_running_loop().time,
        )
        return self

    async def _load(self, model: str | Path) -> Policy:
        loaded = await run_in_thread(load_policy, model)
        return await self._owned.enter_async_context(loaded)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dependencies = None
        if self._admission is not None:
            self._warn_of_limit(self._admission)
        try:
            closed = await asyncio.gather(*(batch.close() for batch in self._batches), return_exceptions=True)
            failures = [failure for failure in closed if failure is not None]
            for failure in failures[1:]:
                logger.error("Closing another batch failed, too.", exc_info=failure)
            for failure in failures:  # once all have been closed: none holds up the others
                raise failure
        finally:
            await self._owned.aclose()

    def concurrency(self) -> ConcurrencyStats:
        """Return how many rollouts ran so far, and what blocked others."""
        self._require_entered()
        assert self._admission is not None
        return self._admission.meter.read()

    def _warn_of_limit(self, admission: Admission) -> None:
        """Warn if the limit on concurrent rollouts alone delayed rollouts for a large part of the time."""
        found, at_policy = admission.meter.read(), admission.generations
        share = found.blocked_fraction(BlockReason.LIMIT)
        if (
            found.seconds < LIMIT_WARNING_MIN_S
            or share < LIMIT_WARNING_FRACTION
            or (self._max_concurrent and at_policy is None)
        ):
            return
        bound = f"max_concurrent_rollouts={admission.max_concurrent}"
        if self._max_concurrent is None:
            bound = f"{admission.max_concurrent}, by the memory that was free"
        logger.warning(
            "For %.0f %% of the time rollouts waited only because the maximum number was running (%s). Meanwhile there "
            "were %.0f concurrent generations on average%s. A higher max_concurrent_rollouts may make such a run "
            "faster.",
            100 * share,
            bound,
            found.generation_seconds / found.seconds,
            f", and the policy can make {at_policy}" if at_policy is not None else "",
        )

    def occupancy(self) -> dict[str, Occupancy]:
        """Return how long the engine's instances were leased and used so far, by the labels of their specs."""
        return self._require_entered().engine.occupancy()

    def batch(self, tasks: Tasks = (), **settings: Unpack[BatchSettings]) -> Batch:
        """Start a batch of concurrent rollouts, which are delivered as they finish. More can be added at any time.

        Several batches of a runner may run at the same time; those of higher priority go first.

        Args:
            tasks: the first tasks; see `agentfly.run`. An iterable that is not a list is read on the event loop, a few
                tasks ahead of the rollouts, so it may be infinite.
            settings: see `BatchSettings`.

        Raises:
            UsageError: a setting is unknown or invalid.
        """
        dependencies, admission = self._require_entered(), self._admission
        assert admission is not None
        check_batch(settings)
        label = settings.get("label") or uuid.uuid4().hex[:8]
        priority = settings.get("priority", 0)
        change = settings.get("sampling") or keep_sampling

        def sampling(params: SamplingParams) -> SamplingParams:
            changed = change(params)
            if not isinstance(changed, SamplingParams):
                raise UsageError(
                    f"The function given as sampling returned {changed!r:.100}, not SamplingParams. Write, for "
                    "instance, sampling=lambda params: dataclasses.replace(params, temperature=0.5)."
                )
            return changed if changed.priority == priority else replace(changed, priority=priority)

        dependencies.runtime.sampling(sampling)  # raises an error of ``sampling`` before anything begins

        def make(trajectory: Trajectory, ticket: AdmissionTicket, cancelled: Callable[[], bool]) -> Rollout:
            return Rollout(
                dependencies,
                trajectory,
                sampling=sampling,
                priority=priority,
                wait_observer=ticket.waiting_for_resources,
                generation=ticket.generation,
                cancelled=cancelled,
            )

        batch = Batch(
            make,
            admission=admission,
            backlog=Backlog(label, Prefetcher(dependencies).prefetch, settings.get("first_group", 0)),
            failure_budget=FailureBudget(self._max_failure_rate, lambda: admission.meter.peak),
            attempts=settings.get("attempts", 1),
            priority=priority,
            record=settings.get("record"),
            score_group=group_scorer(self._reward, dependencies.engine, self._events, priority=priority),
        )
        self._batches = {batch, *(other for other in self._batches if not other.closed)}
        batch.add(tasks)
        return batch

    async def stream(self, tasks: Tasks, **settings: Unpack[BatchSettings]) -> AsyncIterator[Trajectory]:
        """Yield trajectories as they finish. Leaving the iteration cancels the others and releases their resources.

        The arguments are those of `batch`.

        Raises:
            FailureBudgetExceeded: too many rollouts, or all of them, failed for reasons of infrastructure.
        """
        async with self.batch(tasks, **settings) as batch:
            async for trajectory in batch:
                yield trajectory

    async def collect(self, tasks: Tasks, **settings: Unpack[BatchSettings]) -> list[Trajectory]:
        """Return all trajectories in the order of tasks and attempts. Arguments and errors are those of `stream`."""
        async with self.batch(tasks, **settings) as batch:
            trajectories = [trajectory async for trajectory in batch]
        return sorted(trajectories, key=lambda t: (_task_number(t), t.attempt))

    def settings_fingerprint(self, change: Callable[[SamplingParams], SamplingParams] | None = None) -> dict[str, Any]:
        """Return the settings that determine the rollouts, as JSON values by name.

        Rollouts of different settings are never mixed in one record.

        Args:
            change: changes the agent's sampling.
        """
        sampling = asdict(self._require_entered().runtime.sampling(change or keep_sampling))
        del sampling["priority"]  # it changes the order, not the result
        return {
            "the model": str(self._agent.model),
            "the reward": None if self._reward is None else self._reward.name,
            "the strategy": self._strategy,
            **{f"the agent's {name}": value for name, value in agent_fingerprint(self._agent).items()},
            **{f"the sampling's {name}": value for name, value in sampling.items()},
        }

    def _require_entered(self) -> RunnerDependencies:
        if self._dependencies is None:
            raise UsageError("The runner is not open. Use it as `async with Runner(agent) as runner: …`.")
        return self._dependencies


def check_batch(settings: BatchSettings) -> None:
    """Check the settings of a batch.

    Raises:
        UsageError: a setting is unknown.
        ConfigError: a setting is out of its range or has a wrong type.
    """
    reject_unknown_arguments("A batch", settings, BatchSettings.__annotations__)
    require_whole("batch", attempts=settings.get("attempts", 1))
    require_whole("batch", least=None, priority=settings.get("priority", 0))
    require_whole("batch", least=0, first_group=settings.get("first_group", 0))
    change, label = settings.get("sampling"), settings.get("label")
    if change is not None and not callable(change):
        raise ConfigError(
            f"sampling={change!r:.100}: it must be a function that changes how the agent samples, as in "
            "sampling=lambda params: dataclasses.replace(params, temperature=0.5)."
        )
    if label is not None and not isinstance(label, str):
        raise ConfigError(f"label={label!r:.100}: it must be a string, the prefix of the rollouts' ids.")


def require_engine(engine: object) -> None:
    """Check that ``engine`` is a `ResourceEngine` or None.

    Raises:
        UsageError: it is something else.
    """
    if engine is not None and not isinstance(engine, ResourceEngine):
        raise UsageError(
            f"engine={engine!r:.100}: it must be a ResourceEngine, as in "
            "`async with af.ResourceEngine() as engine:`. Leave it out, and one is made."
        )


def require_events(events: object) -> None:
    """Check that ``events`` is an `EventStream` or None.

    Raises:
        UsageError: it is something else.
    """
    if events is not None and not isinstance(events, EventStream):
        raise UsageError(
            f"events={events!r:.100}: it must be an agentfly.core.events.EventStream. To have a function receive "
            "events, call events.subscribe(function)."
        )


def require_policies(policy: object, subagent_policies: object) -> None:
    """Check that ``policy`` is a policy or None, and ``subagent_policies`` a mapping from models to policies.

    Raises:
        UsageError: one of them is something else.
    """
    if not isinstance(subagent_policies, Mapping):
        raise UsageError(
            f"subagent_policies={subagent_policies!r:.100}: give policies by the models of the subagents, as in "
            "subagent_policies={'Qwen/Qwen2.5-3B-Instruct': policy}."
        )
    for given in (*([] if policy is None else [policy]), *subagent_policies.values()):
        require_policy(given)


def require_policy(policy: object) -> None:
    """Check that ``policy`` is a policy, not the name of a model or a class.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(policy, str | Path):
        raise UsageError(
            f"policy={str(policy)!r}: a policy is an object, not a name. To load a model in this process, use "
            "Agent(model=…). For an endpoint, pass af.OpenAIPolicy('http://…/v1', 'model')."
        )
    if isinstance(policy, type):
        raise UsageError(f"{policy.__name__} is a class. Pass an instance: {policy.__name__}(…).")
    if not isinstance(policy, Policy | ChatPolicy):
        raise UsageError(
            f"policy is {type_of(policy)}, not a policy. Pass an af.VLLMPolicy, af.OpenAIPolicy or af.ScriptedPolicy, "
            "the result of agentfly.policies.load.load_policy('tiny'), or an object with the methods of "
            "agentfly.policies.policy.Policy."
        )


def _task_number(trajectory: Trajectory) -> int:
    return int(trajectory.group_id.rpartition("-")[2])
