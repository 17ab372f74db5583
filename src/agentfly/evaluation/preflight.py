"""Preflight: checks that everything a run needs is present and works, before any long work."""

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
from agentfly.core.errors import (
    AgentFlyError,
    ChatFormatError,
    ConfigError,
    ResourceError,
    describe_error,
    error_message,
    reject_unknown_arguments,
)
from agentfly.core.numbers import require_durations
from agentfly.core.task import Task, Tasks, shared_tasks, to_tasks
from agentfly.core.threads.pool import run_in_thread
from agentfly.core.trajectory import FinishReason, ToolRecord, Trajectory
from agentfly.policies.load import load_policy
from agentfly.policies.policy import ChatPolicy, Policy, SamplingParams, enforces_token_limits
from agentfly.policies.scripted import Script, ScriptedPolicy
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.resources.resource import Status
from agentfly.resources.spec import ResourceSpec
from agentfly.rollouts.metrics import is_success
from agentfly.rollouts.run import require_reward_fields, require_tool_fields
from agentfly.rollouts.runner import Runner, require_agent, require_engine, require_policy
from agentfly.rollouts.token_recorder import require_strategy
from agentfly.rollouts.trajectory_rendering import CannotRender, TokenRequirement

CheckResults = AsyncGenerator["CheckResult", None]
AnyPolicy = Policy | ChatPolicy

IDLE_ANSWER = "Done."
"""The answer of an idle agent in every turn."""

ORACLE_FAILURES = frozenset({FinishReason.LENGTH, FinishReason.INVALID_CALLS, FinishReason.WALL_TIME})
"""Finish reasons that mean that an oracle is faulty."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    Attributes:
        subject: what was checked, for instance ``tool shell``.
        ok: whether it works.
        suspicious: whether it works, but is probably not intended.
        detail: further information. If the check failed, the reason and what to do.
        seconds: duration of the check.
    """

    subject: str
    ok: bool
    detail: str = ""
    seconds: float = 0.0
    suspicious: bool = False


def check_definitions(agent: Agent, tasks: Tasks, reward: AnyReward | None = None) -> list[CheckResult]:
    """Check the definitions of agent, tasks and reward, the part of a preflight that takes no time.

    It builds each tool's schema, checks that every task has the fields that the tools and the reward take, and resolves
    the resources that they declare for the first task.
    """
    require_agent(agent)
    if reward is not None:
        require_reward(reward)
    rows = to_tasks(tasks)
    return [
        *(_check_now(f"tool {tool.name}", partial(_check_tool, tool, rows)) for tool in agent.tools),
        *([] if reward is None else [_check_now(f"reward {reward.name}", partial(_check_reward, reward, rows))]),
    ]


async def check(agent: Agent, tasks: Tasks, **settings: Any) -> list[CheckResult]:
    """Run a preflight and return all its results. Arguments and errors are the same as for `preflight`."""
    reject_unknown_arguments("check", settings, signature(preflight).parameters)
    return [result async for result in preflight(agent, tasks, **settings)]


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
) -> CheckResults:
    """Try everything that a run needs on the first task, and yield the result of each check as it ends.

    1. The definitions (`check_definitions`).
    2. Each resource that tools and reward declare: one instance is started, its status is checked, and it is released.
    3. A rollout of the oracle, with the tools, resources and reward of a run. Then a rollout of an idle agent, which
       should not earn as much as the oracle.
    4. The model: it is loaded, its chat format is checked with the agent's tools, the oracle's turns are counted in its
       tokens, and it generates one token.

    Args:
        agent: the agent.
        tasks: tasks, mappings with a ``prompt``, prompts, or the path of a file of such rows (`agentfly.core.task`).
        eval_tasks: the held-out tasks of a training, which must differ from the tasks.
        reward: scores the oracle's rollout.
        oracle: the script of a faultless agent; see `ScriptedPolicy`. Without one, no tool is called.
        policy: an entered policy, or a function that creates one; made from ``agent.model`` if not given.
        engine: starts the resources; created if not given.
        strategy: see `Runner`.
        limit_s: time limit of each check in seconds.

    Raises:
        UsageError: an argument is invalid; the message says which.
    """
    require_agent(agent)
    require_strategy(strategy)
    require_engine(engine)
    if policy is not None and (isinstance(policy, type) or not callable(policy)):
        require_policy(policy)
    require_durations("preflight", limit_s=limit_s)
    rows = to_tasks(tasks)
    held_out = [] if eval_tasks is None else to_tasks(eval_tasks)
    found = check_definitions(agent, [*rows, *held_out], reward)
    for result in found:
        yield result
    if held_out:
        shared = shared_tasks(rows, held_out)
        detail = shared or f"{len(held_out)}, none of them trained on"
        yield CheckResult("held-out tasks", True, detail, suspicious=bool(shared))
    if not all(result.ok for result in found):
        return  # the next checks would fail for the same reason
    async with AsyncExitStack() as stack:
        if engine is None:
            engine = await stack.enter_async_context(ResourceEngine())
        trial = _PreflightRun(agent, rows[0], reward, engine, strategy, limit_s)
        for spec in trial.specs():
            yield await trial.check(f"resource {spec.label}", partial(trial.start, spec))
        played: list[Trajectory] = []
        make = policy or partial(load_policy, agent.model)
        for parts in (trial.run_oracle(oracle, played), trial.run_idle_agent(played), trial.check_model(make, played)):
            async with aclosing(parts):
                async for result in parts:
                    yield result


@dataclass(frozen=True)
class _PreflightRun:
    """The checks of a preflight that run something."""

    agent: Agent
    task: Task
    reward: AnyReward | None
    engine: ResourceEngine
    strategy: str
    limit_s: float

    async def check(self, what: str, work: Callable[[], Any]) -> CheckResult:
        """Run a check within the time limit. ``work`` returns the detail of its result."""
        started = time.perf_counter()
        limit = asyncio.timeout(self.limit_s)
        try:
            async with limit:
                detail = await work()
        except Exception as error:
            reason = f"It took longer than {self.limit_s:g} s." if limit.expired() else _error_text(error)
            return CheckResult(what, False, reason, time.perf_counter() - started)
        return CheckResult(what, True, detail, time.perf_counter() - started)

    # --- resources ----------------------------------------------------------------------------------------------------

    def specs(self) -> list[ResourceSpec[Any]]:
        """Return the resources of the first task, each once."""
        rewards = () if self.reward is None else self.reward.resources_for(self.task)
        return list(dict.fromkeys([*self.agent.resources_for(self.task), *rewards]))

    async def start(self, spec: ResourceSpec[Any]) -> str:
        """Start one instance, check its status, and release it."""
        lease = await self.engine.acquire(spec, "preflight", scope="call")
        try:
            status = await self.engine.check(lease)
        finally:
            await self.engine.release(lease)
        if status is not Status.HEALTHY:
            raise ResourceError(f"{spec.label} starts, and is {status.value} when it is asked how it is.")
        return "starts, is well, and is given back"

    # --- tools and reward ---------------------------------------------------------------------------------------------

    async def run_oracle(self, oracle: Script | Sequence[str] | None, played: list[Trajectory]) -> CheckResults:
        """Run the oracle, if there is one, and add its trajectory to ``played``."""
        if oracle is None:
            return

        async def rolled() -> str:
            trajectory = await self._roll_out(oracle)
            if trajectory.finish_reason in ORACLE_FAILURES:
                raise AgentFlyError(f"It ended after {len(trajectory.turns)} turns as {trajectory.finish_reason}.")
            played.append(trajectory)
            return _ended(trajectory)

        yield await self.check("rollout of the oracle", rolled)
        for trajectory in played:
            records = [record for turn in trajectory.turns for record in turn.tool_results]
            for name in dict.fromkeys(record.call.name for record in records):
                yield _tool_result(name, [record for record in records if record.call.name == name])
            if self.reward is not None:
                yield _score(f"score of {self.reward.name}", trajectory, "the oracle")

    async def run_idle_agent(self, played: Sequence[Trajectory]) -> CheckResults:
        """Run an agent that does nothing, and compare its score with the oracle's, if that was ``played``."""
        ended: list[Trajectory] = []

        async def rolled() -> str:
            ended.append(await self._roll_out(lambda prompt, turn: IDLE_ANSWER))
            return _ended(ended[0])

        yield await self.check("rollout of an idle agent", rolled)
        for trajectory in ended if self.reward is not None else ():
            assert self.reward is not None
            found = _score(f"score of {self.reward.name} for an idle agent", trajectory, "an agent that does nothing")
            warning = _idle_warning(trajectory, played) if found.ok else ""
            yield replace(found, detail=found.detail + warning, suspicious=bool(warning))

    async def _roll_out(self, script: Script | Sequence[str]) -> Trajectory:
        agent = self.agent
        if agent.tool_call_format == "model":  # a script has no template; the model's own is checked with the model
            agent = replace(agent, tool_call_format="hermes")
        async with Runner(
            agent,
            policy=ScriptedPolicy(script, sees=True),
            engine=self.engine,
            reward=self.reward,
            strategy=self.strategy,
            max_failure_rate=1.0,
        ) as runner:
            trajectory = await anext(runner.batch([self.task], label="preflight"))
        if trajectory.failure is not None:
            failure, location = trajectory.failure, trajectory.failure.location or "location not known"
            raise AgentFlyError(f"{failure.kind}: {failure.message} ({location})")
        return trajectory

    # --- the model ----------------------------------------------------------------------------------------------------

    async def check_model(
        self, policy: AnyPolicy | Callable[[], AnyPolicy], played: Sequence[Trajectory]
    ) -> CheckResults:
        """Load the model, check its chat format, count the oracle's turns in its tokens, and generate once."""
        async with AsyncExitStack() as stack:
            ready: list[AnyPolicy] = []

            async def entered() -> str:
                if callable(policy):
                    made = await run_in_thread(policy)
                    ready.append(await stack.enter_async_context(made))
                else:
                    ready.append(policy)
                return f"a context of {ready[0].context_length:,} tokens" if isinstance(ready[0], Policy) else ""

            yield await self.check(f"model {self.agent.model}", entered)
            if not ready:
                return
            runners: list[Runner] = []

            async def proved() -> str:
                runner = Runner(
                    self.agent, policy=ready[0], engine=self.engine, strategy=self.strategy, max_failure_rate=1.0
                )
                runners.append(await stack.enter_async_context(runner))
                return "a conversation with these tools can be continued turn by turn"

            yield await self.check("chat format", proved)
            for runner in runners:
                if isinstance(model := ready[0], Policy) and enforces_token_limits(model):
                    for trajectory in played:
                        yield await self.check(
                            "length of the oracle", partial(self._count_oracle_tokens, trajectory, model)
                        )
                yield await self.check("generation", partial(self._generate_once, runner))

    async def _count_oracle_tokens(self, trajectory: Trajectory, policy: Policy) -> str:
        try:
            length = TokenRequirement.count(
                trajectory,
                self.agent,
                policy.tokenizer,
                strategy=self.strategy,
                context_length=policy.context_length,
            )
        except CannotRender as refusal:
            if refusal.cause == "too_long":
                raise
            return f"not known: {error_message(refusal)}"
        except (ConfigError, ChatFormatError) as error:
            return f"not known: {error_message(error)}"
        length.require_within_limits()
        return f"{length.sequence} tokens of the model, and {length.turn} in its longest turn"

    async def _generate_once(self, runner: Runner) -> str:
        def briefly(params: SamplingParams) -> SamplingParams:
            return replace(params, max_tokens=1)

        trajectory = await anext(runner.batch([self.task], label="preflight", sampling=briefly))
        if trajectory.failure is not None:
            raise AgentFlyError(trajectory.failure.message)
        if not trajectory.turns:
            raise AgentFlyError("The prompt of the first task leaves no room for an answer in the model's context.")
        sampled = sum(sequence.sampled_count for sequence in trajectory.sequences)
        return "token ids come with log-probs" if sampled else "text comes without token ids: it cannot be trained on"


def _check_now(what: str, work: Callable[[], str]) -> CheckResult:
    try:
        return CheckResult(what, True, work())
    except Exception as error:
        return CheckResult(what, False, _error_text(error))


def _error_text(error: Exception) -> str:
    return error_message(error) if isinstance(error, AgentFlyError) else describe_error(error)


def _check_tool(tool: Tool, tasks: Sequence[Task]) -> str:
    json.dumps(tool.definition)
    require_tool_fields(tool, tasks)
    return _needs(tool.resources_for(tasks[0]))


def _check_reward(reward: AnyReward, tasks: Sequence[Task]) -> str:
    require_reward_fields(reward, tasks)
    return _needs(reward.resources_for(tasks[0]))


def _needs(specs: Sequence[ResourceSpec[Any]]) -> str:
    return f"declares {', '.join(spec.label for spec in specs)}" if specs else "declares no resources"


def _tool_result(name: str, records: Sequence[ToolRecord]) -> CheckResult:
    failed = next((record for record in records if record.failure is not None), None)
    seconds = sum(record.seconds for record in records)
    if failed is not None:
        return CheckResult(f"calls of {name}", False, failed.observation, seconds)
    return CheckResult(
        f"calls of {name}", True, f"{len(records)}, the last answered {records[-1].observation!r:.80}", seconds
    )


def _ended(trajectory: Trajectory) -> str:
    return f"{len(trajectory.turns)} turns, ended as {trajectory.finish_reason}"


def _score(what: str, trajectory: Trajectory, played_by: str) -> CheckResult:
    failure, seconds = trajectory.reward_failure, trajectory.seconds.get("reward", 0.0)
    if failure is not None:
        return CheckResult(what, False, f"None for {played_by}. {failure.message}", seconds)
    if trajectory.reward is None:
        return CheckResult(what, False, f"None for {played_by}: no turn to score.", seconds)
    return CheckResult(what, True, f"{trajectory.reward:g} for {played_by}", seconds)


def _idle_warning(idle: Trajectory, played: Sequence[Trajectory]) -> str:
    """Return a warning if the score of an idle agent is probably not intended; else an empty string."""
    remedy = "If that is not intended, fix the task or the reward: nothing can be learned from it."
    if is_success(idle):
        return f", which counts as solved before anything is done. {remedy}"
    assert idle.reward is not None
    for oracle in played:
        if oracle.reward is not None and idle.reward >= oracle.reward:
            return f", no less than the {oracle.reward:g} of the oracle. {remedy}"
    return ""
