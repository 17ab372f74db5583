"""`run` and `evaluate`: roll an agent out on tasks, after a check that the tasks have the required fields."""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Unpack, get_args

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import AnyReward, require_reward
from agentfly.agents.tool import Tool
from agentfly.core.errors import ConfigError, RewardDefinitionError, ToolDefinitionError, reject_unknown_arguments
from agentfly.core.events import RolloutsScheduled
from agentfly.core.gc_tuning import tuned_gc
from agentfly.core.numbers import require_number, require_whole
from agentfly.core.run_directory import RunDirectory, TrajectoryKind
from agentfly.core.signals import cancel_on_sigterm
from agentfly.core.task import Task, Tasks, to_tasks
from agentfly.core.trajectory import Trajectory
from agentfly.policies.policy import SamplingParams
from agentfly.rollouts.metrics import occupancy_metrics, summarize
from agentfly.rollouts.rollout_record import RolloutRecord
from agentfly.rollouts.runner import BatchSettings, Runner, RunnerSettings, check_batch, require_agent
from agentfly.rollouts.scoring import can_be_scored


def require_fields(agent: Agent, tasks: Sequence[Task], reward: AnyReward | None) -> None:
    """Check that each task has the fields that the agent's tools and the reward take.

    Raises the errors of `require_tool_fields` and `require_reward_fields`.
    """
    for tool in agent.tools:
        require_tool_fields(tool, tasks)
    if reward is not None:
        require_reward_fields(reward, tasks)


def require_tool_fields(tool: Tool, tasks: Sequence[Task]) -> None:
    """Check that each task has the fields that a tool, or its class, takes.

    Raises:
        ToolDefinitionError: a task lacks one.
    """
    for name in tool.task_fields:
        if lacking := _lacking(name, tasks):
            raise ToolDefinitionError(f"The tool {tool.name!r} takes the field {name!r}, {lacking}")


def require_reward_fields(reward: AnyReward, tasks: Sequence[Task]) -> None:
    """Check that each task has the fields that a reward, or a part of it, takes.

    Raises:
        RewardDefinitionError: a task lacks one.
    """
    for name in reward.task_fields:
        if lacking := _lacking(name, tasks):
            raise RewardDefinitionError(
                f"The reward {reward.name!r} takes the field {name!r}, {lacking} Besides fields it can take "
                f"'context', {', '.join(map(repr, reward.injectable_names))}."
            )


def _lacking(name: str, tasks: Sequence[Task]) -> str:
    """Return how many tasks lack a field and what to do, as the end of an error message; empty if none does."""
    lacking = [task for task in tasks if name not in task.fields]
    if not lacking:
        return ""
    return (
        f"which {len(lacking)} of {len(tasks)} tasks do not have, for instance {lacking[0].id}, which has "
        f"{sorted(map(str, lacking[0].fields))}. Rename the parameter, give it a default, or add the field to the "
        "tasks."
    )


_SHOWN = ("reward/mean", "unscored", "turns/mean")
"""Metrics that the repr of a result shows."""

NO_REWARD = "nothing is scored: no reward was given, and no tool gave one. Pass reward=…, a function with @af.reward"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class RunResult:
    """The result of a run.

    Attributes:
        trajectories: the trajectories, in the order of the tasks and attempts.
        metrics: metrics over all trajectories, by the names of `agentfly.rollouts.metrics`.
        note: a remark for the user, for instance that nothing was scored; empty if there is none.
    """

    trajectories: list[Trajectory]
    metrics: dict[str, float]
    note: str = ""

    @property
    def rewards(self) -> list[float | None]:
        """The reward of each trajectory; None if it is unscored."""
        return [trajectory.reward for trajectory in self.trajectories]

    def __repr__(self) -> str:
        """Return one line, without the trajectories."""
        shown = ", ".join(f"{name}={value:.4g}" for name, value in self.metrics.items() if name in _SHOWN)
        note = f"; {self.note}" if self.note else ""
        return f"RunResult({len(self.trajectories)} trajectories{', ' if shown else ''}{shown}{note})"


async def run(
    agent: Agent,
    tasks: Tasks,
    *,
    reward: AnyReward | None = None,
    attempts: int = 1,
    sampling: Callable[[SamplingParams], SamplingParams] | None = None,
    label: str | None = None,
    priority: int = 0,
    run_dir: RunDirectory | Path | str | None = None,
    resume: bool = False,
    kind: TrajectoryKind = "rollout",
    step: int = 0,
    **runner_settings: Unpack[RunnerSettings],
) -> RunResult:
    """Roll an agent out on tasks and score the rollouts.

    A cancellation, such as Ctrl-C under `asyncio.run`, releases all resources. So does SIGTERM, which then ends the
    process, unless the program handles that signal itself.

    Args:
        agent: the agent.
        tasks: tasks, mappings with a ``prompt``, prompts, or the path of a file of such rows (`agentfly.core.task`).
        reward: scores each rollout. Without one, the score is the sum of the tools' rewards; a rollout without any is
            unscored.
        attempts: number of rollouts per task; they form a group.
        sampling: changes the agent's sampling, for instance ``lambda s: replace(s, temperature=0.0)``.
        label: prefix of the rollouts' ids; see `BatchSettings`.
        priority: rollouts of a higher priority begin, and get resources, first.
        run_dir: a directory in which each trajectory is saved as soon as it has finished.
        resume: continue the run in ``run_dir``: finished rollouts are not run again, infrastructure failures are.
            Agent, model, reward and sampling must be unchanged; there may be more tasks.
        kind, step: determine the name of the file in ``run_dir``: the purpose of the rollouts, and the number of
            training steps of the model.
        runner_settings: settings of `Runner`: ``policy``, ``engine``, ``events``, ``max_concurrent_rollouts``, …

    Raises:
        UsageError: an argument is unknown or invalid.
        ToolDefinitionError, RewardDefinitionError: a tool or the reward takes a field that a task does not have.
        FailureBudgetExceeded: too large a share of the rollouts failed for reasons that the policy could not cause.
        AgentFlyError: something is missing or wrong before the first rollout starts.
    """
    reject_unknown_arguments("run", runner_settings, [*signature(run).parameters, *RunnerSettings.__annotations__])
    require_whole("run", attempts=attempts)
    require_whole("run", least=0, step=step)
    check_batch(BatchSettings(attempts=attempts, sampling=sampling, label=label, priority=priority))
    if kind not in get_args(TrajectoryKind):
        raise ConfigError(f"kind={kind!r:.100}: it must be one of {', '.join(map(repr, get_args(TrajectoryKind)))}.")
    if run_dir is not None and not isinstance(run_dir, RunDirectory | Path | str):
        raise ConfigError(f"run_dir={run_dir!r:.100}: it must be the path of a directory.")
    require_agent(agent)
    rows = to_tasks(tasks)
    if resume and run_dir is None:
        raise ConfigError("resume=True needs run_dir, the directory of the run to continue.")
    if reward is not None:
        require_reward(reward)
    require_fields(agent, rows, reward)
    directory = run_dir if isinstance(run_dir, RunDirectory) or run_dir is None else RunDirectory(run_dir)
    record = None if directory is None else RolloutRecord(directory.trajectories_file(step, kind), resume=resume)
    with cancel_on_sigterm():
        async with Runner(agent, reward=reward, **runner_settings) as runner, AsyncExitStack() as stack:
            settings = BatchSettings(
                attempts=attempts, sampling=sampling, label=label, priority=priority, record=record
            )
            if directory is not None and record is not None:
                settings["label"] = label or record.info.get("label") or uuid.uuid4().hex[:8]
                about = {"label": settings["label"], "tasks": len(rows), "attempts": attempts}
                directory.ensure()
                stack.callback(directory.remove_unless_begun)
                await stack.enter_async_context(record.opened(runner.settings_fingerprint(sampling), about))
            if (events := runner_settings.get("events")) is not None:
                total = len(rows) * attempts
                events.emit(
                    RolloutsScheduled(total=total, recorded=0 if record is None else min(record.recorded, total))
                )
            stack.enter_context(tuned_gc())
            before, began = runner.occupancy(), runner.concurrency()
            trajectories = await runner.collect(rows, **settings)
            resources = occupancy_metrics(before, runner.occupancy())
            concurrency = (runner.concurrency() - began).metrics()
    note = NO_REWARD if reward is None and _nothing_scored(trajectories) else ""
    if note:
        _warn_once(note)
    return RunResult(trajectories, summarize(trajectories) | concurrency | resources, note)


def _nothing_scored(trajectories: Sequence[Trajectory]) -> bool:
    """Whether there are rollouts that could be scored, and none of them is."""
    sound = [trajectory.reward for trajectory in trajectories if can_be_scored(trajectory)]
    return bool(sound) and all(reward is None for reward in sound)


@functools.cache
def _warn_once(note: str) -> None:
    """Log a warning once per process."""
    logger.warning("%s%s. (This is logged once.)", note[:1].upper(), note[1:])


async def evaluate(
    agent: Agent,
    tasks: Tasks,
    *,
    reward: AnyReward | None = None,
    attempts: int = 1,
    temperature: float = 0.0,
    label: str | None = None,
    priority: int = 1,
    run_dir: RunDirectory | Path | str | None = None,
    resume: bool = False,
    step: int = 0,
    **runner_settings: Unpack[RunnerSettings],
) -> RunResult:
    """Roll an agent out on held-out tasks, by default with the most likely tokens. The arguments are those of `run`.

    Its priority is higher by default: its requests for resources go before those of a `run` on the same engine, and
    its rollouts begin before those of other batches of the same runner.
    """
    reject_unknown_arguments(
        "evaluate", runner_settings, [*signature(evaluate).parameters, *RunnerSettings.__annotations__]
    )
    require_whole("evaluate", attempts=attempts)
    require_number("evaluate", least=0, temperature=temperature)
    return await run(
        agent,
        tasks,
        reward=reward,
        attempts=attempts,
        sampling=lambda params: replace(params, temperature=temperature),
        label=label,
        priority=priority,
        run_dir=run_dir,
        resume=resume,
        kind="eval",
        step=step,
        **runner_settings,
    )
