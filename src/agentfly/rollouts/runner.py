"""Runner: many rollouts at once, each waiting only for itself."""

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
"""From this share of the time on, in which the limit alone held rollouts back, the user is told."""

LIMIT_WARNING_MIN_S = 10.0
"""Of runs that are shorter nothing is told."""

logger = logging.getLogger(__name__)


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
    raise UsageError(f"agent is {type_of(agent)}, not an Agent. Pass an Agent, e.g. Agent(model='tiny').")


class BatchSettings(TypedDict, total=False):
    """How a batch of rollouts is run.

    Attributes:
        attempts: rollouts a task; they form a group. 1 if not given.
        sampling: changes the agent's sampling, for instance ``lambda s: replace(s, temperature=0.0)``.
        label: begins the ids of the rollouts. Rollouts of the same label, task and attempt sample the same tokens from
            a seeded policy, so a label must not be in use twice at a time. Made at random if not given.
        priority: higher ones begin, get resources and are sampled first. 0 if not given.
        record: where finished rollouts are written, and found again; to be opened before.
        first_group: number of the first group, which ends its id. 0 if not given.
    """

    attempts: int
    sampling: Callable[[SamplingParams], SamplingParams] | None
    label: str | None
    priority: int
    record: RolloutStore | None
    first_group: int


class RunnerSettings(TypedDict, total=False):
    """The settings of a `Runner` besides its agent and reward, which say what they mean."""

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

    A policy or engine that is given belongs to the caller; one that is not given is made, and released when the runner
    is left. A policy that is not in use yet is entered, and left with the runner.

    Args:
        agent: the agent.
        policy: where tokens come from; made from ``agent.model`` if not given.
        engine: schedules the resources; made if not given.
        reward: scores the finished rollouts; without one, the sum of the tools' rewards is the score.
        events: where events go.
        max_concurrent_rollouts: how many rollouts run at a time at most; if not given, as many as keep the policy busy
            and fit into memory. The others wait their turn, in order, and also while those that run wait for resources
            (see `Admission`).
        max_concurrent_starts: how many resources may be starting at once, as of `ResourceEngine`, for an engine that is
            made here.
        strategy: how turns become token sequences: ``"chain"``, one that grows as long as the conversation does, or
            ``"step"``, one for each turn.
        subagent_policies: what subagents with another model speak by, by the model; made of it if not given. What these
            sample is not trained.
        max_failure_rate: a batch stops once more than this share of it, or of the rollouts that ended last, failed for
            infrastructure's reasons (see `FailureBudget`).

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
        self._max_failure_share = max_failure_rate
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
            self._tell_of_limit(self._admission)
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
        """How many rollouts ran so far, and what held others back."""
        self._require_entered()
        assert self._admission is not None
        return self._admission.meter.read()

    def _tell_of_limit(self, admission: Admission) -> None:
        """Tell whether more rollouts could have run at a time, where that is known."""
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
            "For %.0f %% of the time rollouts waited only because as many ran as may (%s). Meanwhile there were %.0f "
            "generations at a time on average%s. A higher max_concurrent_rollouts may make such a run faster.",
            100 * share,
            bound,
            found.generation_seconds / found.seconds,
            f", where the policy can make {at_policy}" if at_policy is not None else "",
        )

    def occupancy(self) -> dict[str, Occupancy]:
        """How much the engine's instances were leased and used so far, by the labels of their specs."""
        return self._require_entered().engine.occupancy()

    def batch(self, tasks: Tasks = (), **settings: Unpack[BatchSettings]) -> Batch:
        """Rollouts that run side by side and are handed out as they finish, with more to be added at any time.

        Several batches of a runner may be under way at once; those of higher priority go first.

        Args:
            tasks: the tasks to begin with, as of `agentfly.run`. An iterable that is no list is read on the event
                loop, a few tasks ahead of what begins, so that there may be any number of them.
            settings: see `BatchSettings`.

        Raises:
            UsageError: a setting is unknown, or is not what it has to be.
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

        dependencies.runtime.sampling(sampling)  # so that what cannot be is told before anything begins

        def make(trajectory: Trajectory, ticket: AdmissionTicket, unwanted: Callable[[], bool]) -> Rollout:
            return Rollout(
                dependencies,
                trajectory,
                sampling=sampling,
                priority=priority,
                notice=ticket.waiting_for_resources,
                generation=ticket.generation,
                unwanted=unwanted,
            )

        batch = Batch(
            make,
            admission=admission,
            backlog=Backlog(label, Prefetcher(dependencies).prefetch, settings.get("first_group", 0)),
            health=FailureBudget(self._max_failure_share, lambda: admission.meter.peak),
            attempts=settings.get("attempts", 1),
            priority=priority,
            record=settings.get("record"),
            score_group=group_scorer(self._reward, dependencies.engine, self._events, priority=priority),
        )
        self._batches = {batch, *(other for other in self._batches if not other.closed)}
        batch.add(tasks)
        return batch

    async def stream(self, tasks: Tasks, **settings: Unpack[BatchSettings]) -> AsyncIterator[Trajectory]:
        """Trajectories as they finish. Leaving the iteration cancels what still runs and gives its resources back.

        Arguments: as of `batch`.

        Raises:
            FailureBudgetExceeded: infrastructure has spoiled too many rollouts, or each of them.
        """
        async with self.batch(tasks, **settings) as batch:
            async for trajectory in batch:
                yield trajectory

    async def collect(self, tasks: Tasks, **settings: Unpack[BatchSettings]) -> list[Trajectory]:
        """All trajectories, in the order of the tasks and attempts. Arguments and errors: as of `stream`."""
        async with self.batch(tasks, **settings) as batch:
            trajectories = [trajectory async for trajectory in batch]
        return sorted(trajectories, key=lambda t: (_task_number(t), t.attempt))

    def settings_fingerprint(self, change: Callable[[SamplingParams], SamplingParams] | None = None) -> dict[str, Any]:
        """What shapes the rollouts, as JSON-able values by name, so that they are told apart from other ones.

        Args:
            change: changes the agent's sampling.
        """
        sampling = asdict(self._require_entered().runtime.sampling(change or keep_sampling))
        del sampling["priority"]  # it says when, and not how
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
    """See that the settings of a batch are what they have to be.

    Raises:
        UsageError: one is unknown.
        ConfigError: one is out of its range, or of another type.
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
        raise ConfigError(f"label={label!r:.100}: it must be a text, with which the ids of the rollouts begin.")


def require_engine(engine: object) -> None:
    """Raise unless ``engine`` is a `ResourceEngine`, or None.

    Raises:
        UsageError: it is something else.
    """
    if engine is not None and not isinstance(engine, ResourceEngine):
        raise UsageError(
            f"engine={engine!r:.100}: it must be a ResourceEngine, as in "
            "`async with af.ResourceEngine() as engine:`. Leave it out, and one is made."
        )


def require_events(events: object) -> None:
    """Raise unless ``events`` is an `EventStream`, or None.

    Raises:
        UsageError: it is something else.
    """
    if events is not None and not isinstance(events, EventStream):
        raise UsageError(
            f"events={events!r:.100}: it must be an agentfly.core.events.EventStream. A function is told of events by "
            "events.subscribe(function)."
        )


def require_policies(policy: object, subagent_policies: object) -> None:
    """Raise unless ``policy`` is one, or None, and ``subagent_policies`` are some by the models of subagents.

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
    """Raise unless ``policy`` is a policy: the name of a model is easily taken for it.

    Raises:
        UsageError: it is something else.
    """
    if isinstance(policy, str | Path):
        raise UsageError(
            f"policy={str(policy)!r}: a policy is an object, not a name. Name a model for this process by "
            "Agent(model=…); for an endpoint give af.OpenAIPolicy('http://…/v1', 'model')."
        )
    if isinstance(policy, type):
        raise UsageError(f"{policy.__name__} is a class. Pass a policy that is made of it: {policy.__name__}(…).")
    if not isinstance(policy, Policy | ChatPolicy):
        raise UsageError(
            f"policy is {type_of(policy)}, not a policy. Pass an af.VLLMPolicy, af.OpenAIPolicy or af.ScriptedPolicy, "
            "what agentfly.policies.load.load_policy('tiny') makes, or an object with the methods of "
            "agentfly.policies.policy.Policy."
        )


def _task_number(trajectory: Trajectory) -> int:
    return int(trajectory.group_id.rpartition("-")[2])
