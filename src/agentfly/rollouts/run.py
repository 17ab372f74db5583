"""run and evaluate: the two calls that roll an agent out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import AnyReward
from agentfly.interruption import ended_by_sigterm
from agentfly.policies.policy import SamplingParams
from agentfly.rollouts.runner import Runner
from agentfly.rollouts.summary import occupancy_metrics, summarize
from agentfly.task import Task, as_tasks
from agentfly.trajectory import Trajectory

Tasks = Iterable[Task | Mapping[str, Any] | str] | str | Path


@dataclass(frozen=True)
class RunResult:
    """What came of rolling an agent out.

    Attributes:
        trajectories: in the order of the tasks and attempts.
        metrics: numbers over all of them, by the names of `agentfly.rollouts.summary`.
    """

    trajectories: list[Trajectory]
    metrics: dict[str, float]

    @property
    def rewards(self) -> list[float | None]:
        """The score of each trajectory; None where it is unscored."""
        return [trajectory.reward for trajectory in self.trajectories]


async def run(
    agent: Agent,
    tasks: Tasks,
    *,
    reward: AnyReward | None = None,
    attempts: int = 1,
    sampling: Callable[[SamplingParams], SamplingParams] | None = None,
    label: str | None = None,
    priority: int = 0,
    **runner_settings: Any,
) -> RunResult:
    """Roll an agent out on tasks and score what it did.

    Cancelling it, and so Ctrl-C under `asyncio.run`, gives everything back. SIGTERM does so too and then ends the
    process, unless the program takes that signal itself.

    Args:
        agent: the agent.
        tasks: tasks, mappings with a ``prompt``, prompts, or the path of a JSON-lines file of such rows.
        reward: scores each rollout.
        attempts: rollouts a task; they form a group.
        sampling: changes the agent's sampling, for instance ``lambda s: replace(s, temperature=0.0)``.
        label: begins the ids of the rollouts; see `Runner.stream`.
        priority: of the rollouts' requests for resources; higher goes first.
        runner_settings: as of `Runner`: ``policy``, ``engine``, ``events``, ``max_concurrent_rollouts``, …

    Raises:
        TooManyFailures: too large a share of the rollouts failed for reasons the policy could not cause.
        AgentFlyError: something is missing or wrong before the first rollout starts.
    """
    rows = as_tasks(tasks)
    with ended_by_sigterm():
        async with Runner(agent, reward=reward, **runner_settings) as runner:
            before = runner.occupancy()
            trajectories = await runner.collect(
                rows, attempts=attempts, sampling=sampling, label=label, priority=priority
            )
            resources = occupancy_metrics(before, runner.occupancy())
    return RunResult(trajectories, summarize(trajectories) | resources)


async def evaluate(
    agent: Agent,
    tasks: Tasks,
    *,
    reward: AnyReward | None = None,
    attempts: int = 1,
    temperature: float = 0.0,
    label: str | None = None,
    priority: int = 1,
    **runner_settings: Any,
) -> RunResult:
    """Roll an agent out on held-out tasks, by default with the most likely tokens. Arguments: as of `run`.

    Its requests for resources go before those of a `run` on the same engine.
    """
    return await run(
        agent,
        tasks,
        reward=reward,
        attempts=attempts,
        sampling=lambda params: replace(params, temperature=temperature),
        label=label,
        priority=priority,
        **runner_settings,
    )
