"""Preflight: whether everything that a run needs is there and works, before any long work."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import AnyReward, require_reward
from agentfly.agents.tool import Tool
from agentfly.durations import require_durations
from agentfly.errors import AgentFlyError, ChatFormatError, ConfigError, ResourceError, message_of, refuse_unknown, say
from agentfly.policies.load import load_policy
from agentfly.policies.policy import ChatPolicy, Policy, SamplingParams, token_limits_bind
from agentfly.policies.scripted import Script, ScriptedPolicy
from agentfly.resources.engine import ResourceEngine
from agentfly.resources.resource import Status
from agentfly.resources.spec import ResourceSpec
from agentfly.rollouts.rendering import NotRendered
from agentfly.rollouts.runner import Runner, require_agent, require_engine, require_policy
from agentfly.rollouts.spoken_length import SpokenLength
from agentfly.rollouts.strategy import require_strategy
from agentfly.rollouts.summary import succeeded
from agentfly.rollouts.task_fields import require_reward_fields, require_tool_fields
from agentfly.task import Task, Tasks, as_tasks, shared_tasks
from agentfly.threads.pool import on_thread
from agentfly.trajectory import FinishReason, ToolRecord, Trajectory

Findings = AsyncGenerator["Finding", None]
AnyPolicy = Policy | ChatPolicy

TRIVIAL = "Done."
"""What an agent says, turn by turn, that does nothing."""

CUT_SHORT = frozenset({FinishReason.LENGTH, FinishReason.INVALID_CALLS, FinishReason.WALL_TIME})
"""Ends that no oracle comes to."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one part of a preflight found.

    Attributes:
        what: what was tried, for instance ``tool shell``.
        ok: whether it works.
        doubtful: whether it works, and is probably not what is meant.
        said: what is to be known of it; where it does not work, why, and what to do about it.
        seconds: how long it took.
    """

    what: str
    ok: bool
    said: str = ""
    seconds: float = 0.0
    doubtful: bool = False


def check_definitions(agent: Agent, tasks: Tasks, reward: AnyReward | None = None) -> list[Finding]:
    """The part of a preflight that takes no time: whether agent, tasks and reward go together as they are written.

    Each tool's schema is made, each field that a tool or the reward asks for is looked for in every task, and what
    they declare that they need is asked for the first task.
    """
    require_agent(agent)
    if reward is not None:
        require_reward(reward)
    rows = as_tasks(tasks)
    return [
        *(_tried(f"tool {tool.name}", partial(_look_at_tool, tool, rows)) for tool in agent.tools),
        *([] if reward is None else [_tried(f"reward {reward.name}", partial(_look_at_reward, reward, rows))]),
    ]


async def check(agent: Agent, tasks: Tasks, **settings: Any) -> list[Finding]:
    """What a preflight found. Arguments and errors: as of `preflight`."""
    refuse_unknown("check", settings, signature(preflight).parameters)
    return [finding async for finding in preflight(agent, tasks, **settings)]


async def preflight(
    agent: Agent,
    tasks: Tasks,
    *,
    eval_tasks: Tasks | None = None,
    reward: AnyReward | None = None,
    oracle: Script | Sequence[str] | None = None,
    policy: AnyPolicy | Callable[[], AnyPolicy] | None = None,
    engine: ResourceEngine | None = None,
    strategy: str = "chain",
    limit_s: float = 600.0,
) -> Findings:
    """Try everything that a run needs, on the first task, and tell of each thing as soon as it was tried.

    First what is written (`check_definitions`). Then one instance of each resource that tools and reward declare is
    started, asked how it is, and released. Then the oracle is played, with the tools, the resources and the reward as
    they are in a run, and an agent that does nothing, which should not earn what the oracle earns. Last the model is
    loaded, its chat format proved with the agent's tools, what the oracle said is counted in its tokens, and it is
    asked for a word.

    Args:
        agent: the agent.
        tasks: tasks, mappings with a ``prompt``, prompts, or the path of a file of such rows (`agentfly.task_files`).
        eval_tasks: the held-out tasks of a training, which have to be others than the tasks.
        reward: scores the oracle's rollout.
        oracle: what an agent without fault would say, as of `ScriptedPolicy`; without one nothing is called.
        policy: an entered policy, or what makes one that is to be entered; from ``agent.model`` if not given.
        engine: starts the resources; made if not given.
        strategy: as of `Runner`.
        limit_s: seconds that each thing may take.

    Raises:
        UsageError: an argument is not what it has to be; the message says which.
    """
    require_agent(agent)
    require_strategy(strategy)
    require_engine(engine)
    if policy is not None and (isinstance(policy, type) or not callable(policy)):
        require_policy(policy)
    require_durations("preflight", limit_s=limit_s)
    rows = as_tasks(tasks)
    held_out = [] if eval_tasks is None else as_tasks(eval_tasks)
    found = check_definitions(agent, [*rows, *held_out], reward)
    for finding in found:
        yield finding
    if held_out:
        shared = shared_tasks(rows, held_out)
        said = shared or f"{len(held_out)}, of which none is trained on"
        yield Finding("held-out tasks", True, said, doubtful=bool(shared))
    if not all(finding.ok for finding in found):
        return  # what would be tried next would fail for the same reason
    async with AsyncExitStack() as stack:
        if engine is None:
            engine = await stack.enter_async_context(ResourceEngine())
        trial = _Trial(agent, rows[0], reward, engine, strategy, limit_s)
        for spec in trial.specs():
            yield await trial.tried(f"resource {spec.label}", partial(trial.start, spec))
        played: list[Trajectory] = []
        make = policy or partial(load_policy, agent.model)
        for parts in (trial.play(oracle, played), trial.idle(played), trial.load(make, played)):
            async with aclosing(parts):
                async for finding in parts:
                    yield finding


@dataclass(frozen=True)
class _Trial:
    """What a preflight tries things with."""

    agent: Agent
    task: Task
    reward: AnyReward | None
    engine: ResourceEngine
    strategy: str
    limit_s: float

    async def tried(self, what: str, work: Callable[[], Any]) -> Finding:
        """Try something that takes its time; ``work`` answers what is to be said of it."""
        started = time.perf_counter()
        limit = asyncio.timeout(self.limit_s)
        try:
            async with limit:
                said = await work()
        except Exception as error:
            told = f"It took longer than {self.limit_s:g} s." if limit.expired() else _told(error)
            return Finding(what, False, told, time.perf_counter() - started)
        return Finding(what, True, said, time.perf_counter() - started)

    # --- resources ----------------------------------------------------------------------------------------------------

    def specs(self) -> list[ResourceSpec[Any]]:
        """What the first task makes necessary, each once."""
        rewards = () if self.reward is None else self.reward.needs(self.task)
        return list(dict.fromkeys([*self.agent.needs(self.task), *rewards]))

    async def start(self, spec: ResourceSpec[Any]) -> str:
        """Start one instance, see that it is well, and give it back."""
        lease = await self.engine.acquire(spec, "preflight", scope="call")
        try:
            status = await self.engine.check(lease)
        finally:
            await self.engine.release(lease)
        if status is not Status.HEALTHY:
            raise ResourceError(f"{spec.label} starts, and is {status.value} when it is asked how it is.")
        return "starts, is well, and is given back"

    # --- tools and reward ---------------------------------------------------------------------------------------------

    async def play(self, oracle: Script | Sequence[str] | None, played: list[Trajectory]) -> Findings:
        """Play the oracle, if there is one; what came of it goes to ``played``."""
        if oracle is None:
            return

        async def rolled() -> str:
            trajectory = await self._rolled(oracle)
            if trajectory.finish in CUT_SHORT:
                raise AgentFlyError(f"It ended after {len(trajectory.turns)} turns as {trajectory.finish}.")
            played.append(trajectory)
            return _ended(trajectory)

        yield await self.tried("rollout of the oracle", rolled)
        for trajectory in played:
            records = [record for turn in trajectory.turns for record in turn.results]
            for name in dict.fromkeys(record.call.name for record in records):
                yield _calls_of(name, [record for record in records if record.call.name == name])
            if self.reward is not None:
                yield _score(f"score of {self.reward.name}", trajectory, "the oracle")

    async def idle(self, played: Sequence[Trajectory]) -> Findings:
        """Play an agent that does nothing, and compare its score with that of the oracle, if that was ``played``."""
        ended: list[Trajectory] = []

        async def rolled() -> str:
            ended.append(await self._rolled(lambda prompt, turn: TRIVIAL))
            return _ended(ended[0])

        yield await self.tried("rollout of an idle agent", rolled)
        for trajectory in ended if self.reward is not None else ():
            assert self.reward is not None
            found = _score(f"score of {self.reward.name} for an idle agent", trajectory, "an agent that does nothing")
            doubt = _doubt_of(trajectory, played) if found.ok else ""
            yield replace(found, said=found.said + doubt, doubtful=bool(doubt))

    async def _rolled(self, script: Script | Sequence[str]) -> Trajectory:
        agent = self.agent
        if agent.tool_call_format == "model":  # a script has no template; the model's own is proved with the model
            agent = replace(agent, tool_call_format="hermes")
        async with Runner(
            agent,
            policy=ScriptedPolicy(script, sees=True),
            engine=self.engine,
            reward=self.reward,
            strategy=self.strategy,
            max_failure_share=1.0,
        ) as runner:
            trajectory = await anext(runner.batch([self.task], label="preflight"))
        if trajectory.failure is not None:
            failure, place = trajectory.failure, trajectory.failure.place or "no place known"
            raise AgentFlyError(f"{failure.kind}: {failure.message} ({place})")
        return trajectory

    # --- the model ----------------------------------------------------------------------------------------------------

    async def load(self, policy: AnyPolicy | Callable[[], AnyPolicy], played: Sequence[Trajectory]) -> Findings:
        """Load the model, prove its chat format, count the oracle's words in its tokens, and have it say something."""
        async with AsyncExitStack() as stack:
            ready: list[AnyPolicy] = []

            async def entered() -> str:
                if callable(policy):
                    made = await on_thread(policy)
                    ready.append(await stack.enter_async_context(made))
                else:
                    ready.append(policy)
                return f"a context of {ready[0].context_length:,} tokens" if isinstance(ready[0], Policy) else ""

            yield await self.tried(f"model {self.agent.model}", entered)
            if not ready:
                return
            runners: list[Runner] = []

            async def proved() -> str:
                runner = Runner(
                    self.agent, policy=ready[0], engine=self.engine, strategy=self.strategy, max_failure_share=1.0
                )
                runners.append(await stack.enter_async_context(runner))
                return "a conversation with these tools can be continued turn by turn"

            yield await self.tried("chat format", proved)
            for runner in runners:
                if isinstance(model := ready[0], Policy) and token_limits_bind(model):
                    for trajectory in played:
                        yield await self.tried("length of the oracle", partial(self._length, trajectory, model))
                yield await self.tried("generation", partial(self._say, runner))

    async def _length(self, trajectory: Trajectory, policy: Policy) -> str:
        try:
            length = SpokenLength.of(
                trajectory,
                self.agent,
                policy.tokenizer,
                strategy=self.strategy,
                context_length=policy.context_length,
            )
        except NotRendered as refusal:
            if refusal.cause == "too_long":
                raise
            return f"not known: {message_of(refusal)}"
        except (ConfigError, ChatFormatError) as error:
            return f"not known: {message_of(error)}"
        length.require_room()
        return f"{length.sequence} tokens of the model, and {length.turn} in its longest turn"

    async def _say(self, runner: Runner) -> str:
        def briefly(params: SamplingParams) -> SamplingParams:
            return replace(params, max_tokens=1)

        trajectory = await anext(runner.batch([self.task], label="preflight", sampling=briefly))
        if trajectory.failure is not None:
            raise AgentFlyError(trajectory.failure.message)
        if not trajectory.turns:
            raise AgentFlyError("The prompt of the first task leaves no room for an answer in the model's context.")
        sampled = sum(sequence.sampled_count for sequence in trajectory.sequences)
        return "token ids come with log-probs" if sampled else "text comes without token ids: it cannot be trained on"


def _tried(what: str, work: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, work())
    except Exception as error:
        return Finding(what, False, _told(error))


def _told(error: Exception) -> str:
    return message_of(error) if isinstance(error, AgentFlyError) else say(error)


def _look_at_tool(tool: Tool, tasks: Sequence[Task]) -> str:
    json.dumps(tool.definition)
    require_tool_fields(tool, tasks)
    return _needs(tool.needs(tasks[0]))


def _look_at_reward(reward: AnyReward, tasks: Sequence[Task]) -> str:
    require_reward_fields(reward, tasks)
    return _needs(reward.needs(tasks[0]))


def _needs(specs: Sequence[ResourceSpec[Any]]) -> str:
    return f"declares {', '.join(spec.label for spec in specs)}" if specs else "declares no resources"


def _calls_of(name: str, records: Sequence[ToolRecord]) -> Finding:
    failed = next((record for record in records if record.failure is not None), None)
    seconds = sum(record.seconds for record in records)
    if failed is not None:
        return Finding(f"calls of {name}", False, failed.observation, seconds)
    return Finding(
        f"calls of {name}", True, f"{len(records)}, the last answered {records[-1].observation!r:.80}", seconds
    )


def _ended(trajectory: Trajectory) -> str:
    return f"{len(trajectory.turns)} turns, ended as {trajectory.finish}"


def _score(what: str, trajectory: Trajectory, whose: str) -> Finding:
    failure, seconds = trajectory.reward_failure, trajectory.seconds.get("reward", 0.0)
    if failure is not None:
        return Finding(what, False, f"None for {whose}. {failure.message}", seconds)
    if trajectory.reward is None:
        return Finding(what, False, f"None for {whose}: nothing was said that could be scored.", seconds)
    return Finding(what, True, f"{trajectory.reward:g} for {whose}", seconds)


def _doubt_of(idle: Trajectory, played: Sequence[Trajectory]) -> str:
    """Why the score of an agent that does nothing is probably not meant; empty where there is nothing to say."""
    cure = "If that is not meant, mend the task or the reward: nothing is to be learned from it."
    if succeeded(idle):
        return f", which counts as solved before anything is done. {cure}"
    assert idle.reward is not None
    for oracle in played:
        if oracle.reward is not None and idle.reward >= oracle.reward:
            return f", no less than the {oracle.reward:g} of the oracle. {cure}"
    return ""
