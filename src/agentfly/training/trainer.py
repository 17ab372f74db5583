"""Trainer: rolls an agent out, and updates the weights of its policy by what came of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import AnyReward, require_reward
from agentfly.agents.reward import tool_rewards
from agentfly.errors import ConfigError, UsageError
from agentfly.events import (
    CheckpointSaved,
    EvaluationFinished,
    EventStream,
    StepFinished,
    TrainingFinished,
    TrainingStarted,
)
from agentfly.policies.policy import ChatPolicy, Policy
from agentfly.resources.engine import ResourceEngine
from agentfly.rollouts.audit import drift_metrics
from agentfly.rollouts.runner import Runner, require_agent
from agentfly.rollouts.summary import occupancy_metrics, summarize
from agentfly.rollouts.task_fields import require_fields
from agentfly.rollouts.traits import agent_traits
from agentfly.rollouts.voice import NO_OTHERS
from agentfly.run_directory import RunDirectory
from agentfly.task import Task, as_tasks
from agentfly.training.advantages import ALGORITHMS, Evidence
from agentfly.training.batch_metrics import batch_metrics
from agentfly.training.checkpoints import (
    Checkpoints,
    Place,
    load_weights,
    read_learner,
    read_place,
    write_model,
    write_place,
)
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.learning.learner import Learner
from agentfly.training.resume import forget_after, require_same_run
from agentfly.training.retokenization import retokenized
from agentfly.training.rows import Row, RowBatch, rows_from_trajectories
from agentfly.training.task_order import TaskOrder
from agentfly.training.trackers import TRACKERS
from agentfly.training.trackers.tracking import tracked
from agentfly.training.trainable_policy import TrainablePolicy
from agentfly.training.trained_policy import trained_policy
from agentfly.training.worker_thread import in_thread
from agentfly.trajectory import Trajectory, save_trajectories

Tasks = Iterable[Task | Mapping[str, Any] | str] | str | Path


@dataclass(frozen=True)
class TrainResult:
    """What came of a training run.

    Attributes:
        run_dir: the run's directory; `agentfly.run_directory.RunDirectory` reads it.
        steps: number of finished steps, those before a resume included.
        metrics: metrics of each step that this call made, by step.
        evaluations: metrics of each evaluation that this call made, by the number of finished steps.
        checkpoint: the last checkpoint, a Hugging Face directory.
    """

    run_dir: Path
    steps: int
    metrics: dict[int, dict[str, float]]
    evaluations: dict[int, dict[str, float]]
    checkpoint: Path


class Trainer:
    """Trains an agent's policy on tasks.

    Each step rolls out ``attempts`` rollouts of ``tasks_per_step`` tasks, turns their trajectories into rows and
    advantages, and updates the weights that the policy samples from. Rollouts and update alternate, so that every
    token is trained under the weights that sampled it.

    A policy or engine that is given belongs to the caller; one that is not given is made, and released at the end. A
    policy that is not in use yet is entered, and left at the end. A run that is stopped, in whatever way, can be gone
    on with from its last checkpoint by the same call with ``resume=True``.

    Args:
        agent: the agent.
        tasks: what to train on: tasks, mappings with a ``prompt``, prompts, or the path of a JSON-lines file.
        reward: scores the rollouts; without one, the sum of the tools' rewards is the score, 0 where they gave none.
        run_dir: directory of the run's checkpoints, trajectories and metrics.
        eval_tasks: held-out tasks, tried before the first and after the last step, and in between as configured.
        config: the settings.
        events: where events go.
        policy: the policy to train, as it was before the first step; loaded from ``agent.model`` if not given. With a
            `VLLMPolicy` the model learns in this process and its servers sample, with its weights.
        engine: schedules the resources; made if not given.
        subagent_policies: what subagents with another model speak by, by the model; loaded if not given.
        resume: go on from the last checkpoint in ``run_dir``; begin there if it has none.

    Raises:
        ConfigError: the settings, the agent, the policy and the directory do not go together.
        UsageError: ``agent`` is not an `Agent`, ``reward`` is not a reward, or one asks for a field that a task lacks.
    """

    def __init__(
        self,
        agent: Agent,
        tasks: Tasks,
        reward: AnyReward | None = None,
        *,
        run_dir: Path | str,
        eval_tasks: Tasks | None = None,
        config: TrainConfig | None = None,
        events: EventStream | None = None,
        policy: Policy | None = None,
        engine: ResourceEngine | None = None,
        subagent_policies: Mapping[str, Policy | ChatPolicy] = NO_OTHERS,
        resume: bool = False,
    ) -> None:
        require_agent(agent)
        self._agent = agent
        self._reward = tool_rewards if reward is None else reward
        require_reward(self._reward)
        self._config = config or TrainConfig()
        rows = as_tasks(tasks)
        self._order = TaskOrder(rows, self._config.seed)
        self._eval_tasks = as_tasks(eval_tasks) if eval_tasks is not None else []
        require_fields(agent, [*rows, *self._eval_tasks], self._reward)
        self._run = RunDirectory(run_dir)
        self._events = events or EventStream()
        self._given_policy = policy
        self._engine = engine
        self._subagent_policies = subagent_policies
        self._checkpoints = Checkpoints(self._run.checkpoints, keep=self._config.keep_checkpoints)
        self._temperature = _training_temperature(agent, self._config)
        _require_score(agent, self._reward)
        self._trackers = {name: TRACKERS[name]() for name in self._config.trackers}
        if not resume:
            self._run.require_unused()

    async def run(self) -> TrainResult:
        """Train. Cancelling it stops the run in good order; the last checkpoint stands.

        Raises:
            TooManyFailures: infrastructure spoiled too large a share of a batch.
            UsageError: not one rollout of a step can be trained on.
            AgentFlyError: something is missing or wrong before the first rollout starts.
        """
        started = time.perf_counter()
        config, events = self._config, self._events
        async with AsyncExitStack() as owned:
            policy = await self._policy(owned)
            learner, place = await self._start(policy)
            runner = await owned.enter_async_context(self._runner(policy))
            await owned.enter_async_context(self._tracked())
            events.emit(TrainingStarted(run_dir=str(self._run.path), steps=config.steps, start_step=place.step))
            metrics: dict[int, dict[str, float]] = {}
            evaluations: dict[int, dict[str, float]] = {}
            if place.step == 0 and self._eval_tasks:
                evaluations[0] = await self._evaluate(runner, 0)
            while place.step < config.steps:
                place, step_metrics = await self._step(runner, policy, learner, place)
                metrics[place.step] = step_metrics
                if self._is_due(place.step, config.eval_every_steps) and self._eval_tasks:
                    evaluations[place.step] = await self._evaluate(runner, place.step)
                if self._is_due(place.step, config.checkpoint_every_steps):
                    await self._save(policy, learner, place)
            events.emit(TrainingFinished(step=place.step, seconds=time.perf_counter() - started))
        checkpoint = self._checkpoints.latest()
        assert checkpoint is not None
        return TrainResult(self._run.path, place.step, metrics, evaluations, checkpoint)

    # --- before the first step ----------------------------------------------------------------------------------------

    async def _policy(self, owned: AsyncExitStack) -> TrainablePolicy:
        return await trained_policy(self._given_policy, self._agent.model, self._config, self._events, owned)

    async def _start(self, policy: TrainablePolicy) -> tuple[Learner, Place]:
        """The learner and the place to start from: those of the last checkpoint, if there is one to resume."""
        place = Place(
            step=0,
            cursor=0,
            version=policy.version,
            model=str(self._agent.model),
            tasks=self._order.fingerprint,
            agent=agent_traits(self._agent),
            reward=self._reward.name,
            config=self._config.model_dump(mode="json") | {"temperature": self._temperature},
        )
        async with policy.exclusive():
            learner, resumed = await in_thread(partial(self._restored, policy.model, place))
            if resumed is not None:
                policy.weights_updated(resumed.version)
        return learner, resumed or place

    def _restored(self, model: PreTrainedModel, place: Place) -> tuple[Learner, Place | None]:
        """The learner, with model and learner as in the last checkpoint, and its place; None if there is none."""
        self._run.ensure()
        self._checkpoints.remove_unfinished()
        latest = self._checkpoints.latest()
        saved = read_place(latest) if latest else None
        if saved is not None:
            require_same_run(saved, place)
        forget_after(self._run, saved.step if saved else None)
        needs_critic = ALGORITHMS[self._config.algorithm].needs_critic
        learner = Learner(model, self._config, temperature=self._temperature, needs_critic=needs_critic)
        if latest is None or saved is None:
            return learner, None
        load_weights(model, latest)
        learner.load_state(read_learner(latest))
        return learner, replace(saved, config=place.config)

    def _tracked(self) -> AbstractAsyncContextManager[None]:
        about = {"model": str(self._agent.model), "reward": self._reward.name, **self._config.model_dump(mode="json")}
        return tracked(self._trackers, self._run, self._events, project=self._config.project, config=about)

    def _runner(self, policy: Policy) -> Runner:
        return Runner(
            self._agent,
            policy=policy,
            engine=self._engine,
            reward=self._reward,
            events=self._events,
            strategy=self._config.strategy,
            subagent_policies=self._subagent_policies,
            max_concurrent_rollouts=self._config.max_concurrent_rollouts,
            max_failure_share=self._config.max_failure_share,
        )

    # --- a step -------------------------------------------------------------------------------------------------------

    async def _step(
        self, runner: Runner, policy: TrainablePolicy, learner: Learner, place: Place
    ) -> tuple[Place, dict[str, float]]:
        started = time.perf_counter()
        place = replace(place, step=place.step + 1, cursor=place.cursor + self._config.tasks_per_step)
        before = runner.occupancy()
        trajectories = await self._collect(runner, place)
        resources = occupancy_metrics(before, runner.occupancy())
        collected = time.perf_counter()
        learned = await self._update(policy, learner, trajectories)
        ended = time.perf_counter()
        seconds = {
            "time/rollout_s": collected - started,
            "time/update_s": ended - collected,
            "time/step_s": ended - started,
        }
        metrics = summarize(trajectories) | resources | learned | seconds
        self._events.emit(StepFinished(step=place.step, metrics=metrics))
        return place, metrics

    async def _collect(self, runner: Runner, place: Place) -> list[Trajectory]:
        """Roll out the tasks that end at the cursor of ``place``."""
        count = self._config.tasks_per_step
        trajectories = await runner.collect(
            self._order.take(place.cursor - count, count),
            attempts=self._config.attempts,
            sampling=lambda params: replace(params, temperature=self._temperature),
            label=f"step-{place.step:06d}",
        )
        await in_thread(partial(save_trajectories, trajectories, self._run.trajectories_file(place.step)))
        return trajectories

    async def _update(
        self, policy: TrainablePolicy, learner: Learner, trajectories: list[Trajectory]
    ) -> dict[str, float]:
        batch = rows_from_trajectories(trajectories)
        _require_rows(batch)
        told: dict[str, float] = {}
        if self._config.retokenize:
            batch, told = await retokenized(batch, policy, self._temperature)
        metrics = batch_metrics(trajectories, batch, policy.version)
        metrics |= await in_thread(partial(drift_metrics, trajectories, policy.tokenizer))
        stop = threading.Event()
        async with policy.exclusive():
            updates = learner.updates
            try:
                learned = await in_thread(partial(self._learn, learner, batch.rows, stop), stop)
            finally:
                if learner.updates != updates:  # also when the step was cancelled after the weights had changed
                    policy.weights_updated()
        return metrics | learned | told

    def _learn(self, learner: Learner, rows: Sequence[Row], stop: threading.Event) -> dict[str, float]:
        scores = learner.score(rows, stop)
        evidence = Evidence(rows, values=scores.values, token_rewards=scores.token_rewards)
        advantages = ALGORITHMS[self._config.algorithm].estimate(evidence, self._config.advantage)
        return learner.learn(rows, advantages, scores, stop)

    async def _evaluate(self, runner: Runner, step: int) -> dict[str, float]:
        started = time.perf_counter()
        trajectories = await runner.collect(
            self._eval_tasks,
            attempts=self._config.eval_attempts,
            sampling=lambda params: replace(params, temperature=self._config.eval_temperature),
            label="eval",
            priority=1,
        )
        await in_thread(partial(save_trajectories, trajectories, self._run.trajectories_file(step, "eval")))
        metrics = summarize(trajectories) | {"time/eval_s": time.perf_counter() - started}
        self._events.emit(EvaluationFinished(step=step, metrics=metrics))
        return metrics

    async def _save(self, policy: TrainablePolicy, learner: Learner, place: Place) -> None:
        def write(path: Path) -> None:
            write_model(path, policy.model, policy.tokenizer.hf)
            write_place(path, replace(place, version=policy.version), learner.state())

        async with policy.exclusive():
            path = await in_thread(partial(self._checkpoints.save, place.step, write))
        self._events.emit(CheckpointSaved(step=place.step, path=str(path)))

    def _is_due(self, step: int, every: int | None) -> bool:
        return step == self._config.steps or (every is not None and step % every == 0)


def _require_rows(batch: RowBatch) -> None:
    """Raise if there is nothing to train on: going on would look like training and be none.

    Raises:
        UsageError: no trajectory gave a row; the message has the causes.
    """
    if not batch.rows:
        causes = ", ".join(f"{number} {cause.replace('_', ' ')}" for cause, number in sorted(batch.left_out.items()))
        raise UsageError(
            f"No rollout of this step can be trained on: {causes}. A rollout is unscored where it ended before its "
            "first turn, for instance because its prompt is longer than the policy's context; rollouts without "
            "log-probs need a policy that returns them."
        )


def _require_score(agent: Agent, reward: AnyReward) -> None:
    """Raise if every score is sure to be 0.

    Raises:
        ConfigError: the tools are to score the rollouts, and there are none.
    """
    if reward is tool_rewards and not agent.tools:
        raise ConfigError(
            "Nothing scores the rollouts: there is no reward, and the agent has no tools that could give one. "
            "Give reward=..., a function with @reward above it."
        )


def _training_temperature(agent: Agent, config: TrainConfig) -> float:
    """The temperature of training rollouts and of the update.

    Raises:
        ConfigError: the agent samples in a way whose log-probs an update cannot reproduce.
    """
    trained = [agent, *(one for one in agent.subagents if one.model == agent.model)]
    cutting = next((one for one in trained if one.top_p < 1.0 or one.top_k > 0), None)
    if cutting is not None:
        raise ConfigError(
            f"{'The agent' if cutting is agent else 'A subagent'} samples with top_p={cutting.top_p} and "
            f"top_k={cutting.top_k}. Tokens that are sampled from a cut "
            "distribution have log-probs that differ from the model's own, which would be trained as if the policy "
            "had changed. Train with top_p=1 and top_k=0; lower the temperature instead."
        )
    temperature = agent.temperature if config.temperature is None else config.temperature
    if temperature <= 0:
        raise ConfigError(
            "The agent's temperature is 0, so that all attempts at a task would be the same. "
            "Set the training setting temperature, for instance to 1."
        )
    return temperature
