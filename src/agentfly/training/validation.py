"""Validation of a training run: requirements on the agent, the reward, the settings, the rows and the advantages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import AnyReward, GroupReward
from agentfly.agents.reward import tool_rewards
from agentfly.core.errors import ConfigError, UsageError, suggest_name
from agentfly.core.task import Task
from agentfly.rollouts.metrics import METRIC_NAMES, METRIC_PREFIXES
from agentfly.training.advantages import Advantages
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.rows import Row, RowBatch


def require_rows(batch: RowBatch) -> None:
    """Raise if a step has nothing to train on.

    Raises:
        UsageError: no trajectory gave a row; the message has the causes.
    """
    if not batch.rows:
        causes = ", ".join(f"{number} {cause.replace('_', ' ')}" for cause, number in sorted(batch.excluded.items()))
        raise UsageError(
            f"No rollout of this step can be trained on: {causes}. A rollout is unscored if it ended before its first "
            "turn, for instance because its prompt is longer than the policy's context. Rollouts without log-probs "
            "need a policy that returns them. Truncated rollouts need a larger max_row_tokens."
        )


def require_advantages(advantages: Advantages, rows: Sequence[Row], algorithm: str) -> None:
    """Raise unless each sampled token of each row has exactly one advantage (and return, if there are returns).

    Raises:
        UsageError: the shapes differ.
    """
    expected = [(len(row.targets),) for row in rows]
    for values in (advantages.values, advantages.returns):
        shapes = expected if values is None else [np.shape(one) for one in values]
        if shapes != expected:
            found = next((pair for pair in zip(shapes, expected, strict=False) if pair[0] != pair[1]), None)
            what = (
                f"values for {len(shapes)} of {len(expected)} rows"
                if found is None
                else f"an array of shape {found[0]} where the shape must be {found[1]}"
            )
            raise UsageError(
                f"The algorithm {algorithm!r} returned {what}. It must return one array per row, with one number per "
                "sampled token (row.targets)."
            )


def require_reward_source(agent: Agent, reward: AnyReward, *, greedy: bool) -> None:
    """Raise if nothing can score the rollouts.

    Args:
        agent: the agent.
        reward: scores the rollouts.
        greedy: whether single greedy rollouts are scored too, as baselines.

    Raises:
        ConfigError: there is neither a reward nor a tool; or a group reward would have to score single rollouts.
    """
    if reward is tool_rewards and not agent.tools:
        raise ConfigError(
            "Nothing scores the rollouts: there is no reward, and the agent has no tools that could return one. "
            "Pass reward=..., a function decorated with @reward."
        )
    if greedy and isinstance(reward, GroupReward):
        raise ConfigError(
            f"The algorithm's baseline is the score of one greedy rollout, and {reward.name} scores the attempts of a "
            "group by comparing them. Pass a reward that scores each rollout, or choose another algorithm."
        )


def require_evaluations(config: TrainConfig, eval_tasks: Sequence[Task]) -> None:
    """Raise if a setting needs evaluations and there are no held-out tasks.

    Raises:
        ConfigError: there are none, or ``eval_metric`` is not a metric of evaluations.
    """
    reason = (
        "early_stop needs evaluations"
        if config.early_stop is not None
        else "keep_best needs evaluations"
        if config.keep_best
        else f"eval_every_steps={config.eval_every_steps} needs evaluations"
        if config.eval_every_steps is not None
        else ""
    )
    if reason and not eval_tasks:
        raise ConfigError(f"{reason}, and there are no held-out tasks. Pass eval_tasks.")
    metric = config.eval_metric
    if metric not in METRIC_NAMES and not metric.startswith(METRIC_PREFIXES):
        known = [*METRIC_NAMES, *(f"{group}…" for group in METRIC_PREFIXES)]
        raise ConfigError(f"eval_metric={metric!r}: evaluations have no such metric. {suggest_name(metric, known)}")


def training_temperature(agent: Agent, config: TrainConfig) -> float:
    """Return the temperature of training rollouts and of the update.

    Raises:
        ConfigError: the agent's sampling settings give log-probs that an update cannot reproduce.
    """
    trained = [agent, *(one for one in agent.subagents if one.model == agent.model)]
    truncating = next((one for one in trained if one.top_p < 1.0 or one.top_k > 0), None)
    if truncating is not None:
        raise ConfigError(
            f"{'The agent' if truncating is agent else 'A subagent'} samples with top_p={truncating.top_p} and "
            f"top_k={truncating.top_k}. The log-probs of a truncated distribution differ from the model's own. "
            "Training would treat the difference as a change of the policy. Train with top_p=1 and top_k=0; lower "
            "the temperature instead."
        )
    temperature = agent.temperature if config.temperature is None else config.temperature
    if temperature <= 0:
        raise ConfigError(
            "The agent's temperature is 0, so all attempts at a task would be the same. "
            "Set the training setting temperature, for instance to 1."
        )
    return temperature
