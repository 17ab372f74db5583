"""PolicyUpdater: turns a step's rollouts into rows and advantages, and updates the weights."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial

from agentfly.core.threads.pool import run_in_thread_to_completion
from agentfly.evaluation.token_audit import drift_metrics
from agentfly.training.advantages import AdvantageInputs
from agentfly.training.batch_source import StepBatch, greedy_baselines, make_rows
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.learning.learner import Learner
from agentfly.training.metrics import group_metrics, row_metrics
from agentfly.training.rows import Row, RowBatch
from agentfly.training.trainable_policy import TrainablePolicy
from agentfly.training.validation import require_advantages, require_rows


class PolicyUpdater:
    """Makes training rows, estimates their advantages and updates the weights.

    Args:
        policy: samples from the weights.
        learner: updates the weights.
        config: the run's settings.
    """

    def __init__(self, policy: TrainablePolicy, learner: Learner, config: TrainConfig) -> None:
        self.policy = policy
        self._learner = learner
        self._config = config
        self._algorithm = config.chosen_algorithm

    def make_batch(self, gathered: StepBatch) -> RowBatch:
        """Return the rows of the trained groups. With greedy baselines, groups without a valid one are excluded.

        Raises:
            UsageError: the step has no trainable rollout.
        """
        batch = make_rows(gathered.trained_trajectories, self._config)
        if not batch.rows:
            require_rows(make_rows(gathered.trajectories, self._config))
        if not self._algorithm.needs_greedy:
            return batch
        baselines = greedy_baselines(gathered.trained_groups, self._config)
        rows = tuple(row for row in batch.rows if row.group_id in baselines)
        lost = {row.rollout_id for row in batch.rows} - {row.rollout_id for row in rows}
        return RowBatch(rows, {**batch.excluded, "no_baseline": len(lost)} if lost else batch.excluded)

    async def update(self, gathered: StepBatch, batch: RowBatch) -> dict[str, float]:
        """Update the weights from ``batch``, the rows of ``gathered``, and return the metrics."""
        policy, learner = self.policy, self._learner
        everything = make_rows(gathered.trajectories, self._config) if gathered.dropped_groups else batch
        metrics = group_metrics(gathered.trajectories, everything) | row_metrics(batch, policy.version)
        metrics |= await run_in_thread_to_completion(
            partial(drift_metrics, gathered.trained_trajectories, policy.tokenizer)
        )
        stop = threading.Event()
        baselines = greedy_baselines(gathered.trained_groups, self._config) if self._algorithm.needs_greedy else None
        async with policy.exclusive_access():
            updates = learner.updates
            try:
                learned = await run_in_thread_to_completion(partial(self._learn, batch.rows, baselines, stop), stop)
            finally:
                if learner.updates != updates:  # also when the step was cancelled after the weights had changed
                    policy.weights_updated()
        return metrics | learned

    def _learn(
        self, rows: Sequence[Row], baselines: Mapping[str, float] | None, stop: threading.Event
    ) -> dict[str, float]:
        scores = self._learner.score(rows, stop)
        evidence = AdvantageInputs(rows, values=scores.values, token_rewards=scores.token_rewards, baselines=baselines)
        advantages = self._algorithm.estimate(evidence, self._config.advantage)
        require_advantages(advantages, rows, self._config.algorithm)
        return self._learner.learn(rows, advantages, scores, stop)
