"""Trainer: the training loop of rollouts, updates, evaluations and checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import AnyReward, require_reward
from agentfly.agents.reward import tool_rewards
from agentfly.core.errors import UsageError
from agentfly.core.events import CheckpointSaved, EventStream, Progress, StepFinished, TrainingFinished, TrainingStarted
from agentfly.core.gc_tuning import tuned_gc
from agentfly.core.run_directory import RunDirectory
from agentfly.core.task import Tasks, shared_tasks, to_tasks
from agentfly.core.threads.pool import run_in_thread_to_completion
from agentfly.policies.embedded.loading import dtype_of
from agentfly.policies.policy import ChatPolicy, Policy
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.rollouts.agent_runtime import NO_POLICIES
from agentfly.rollouts.metrics import occupancy_metrics, summarize
from agentfly.rollouts.rollout_record import agent_fingerprint, fingerprint_value
from agentfly.rollouts.run import require_fields
from agentfly.rollouts.runner import Runner, require_agent, require_engine, require_events, require_policies
from agentfly.training.batch_source import BatchSource
from agentfly.training.checkpoints import (
    Checkpoints,
    TrainerState,
    load_weights,
    read_trainer_state,
    restore_learner,
    write_model,
    write_trainer_state,
)
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.curriculum import Curriculum, make_task_order
from agentfly.training.evaluator import Evaluator
from agentfly.training.journal import Journal
from agentfly.training.learning.learner import Learner
from agentfly.training.metrics import DISPATCHED, TRAINED, RolloutBusyTimer, duration_metrics, durations
from agentfly.training.resume import (
    can_resume,
    depends_on_steps,
    how_to_go_further,
    last_saved_step,
    remove_after,
    require_same_run,
    resumed_evaluations,
)
from agentfly.training.rollout_queue import TRAIN
from agentfly.training.trackers import TRACKERS
from agentfly.training.trackers.tracker import track_run
from agentfly.training.trainable_policy import TrainablePolicy, open_trainable_policy
from agentfly.training.update import PolicyUpdater
from agentfly.training.validation import require_evaluations, require_reward_source, training_temperature

logger = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class TrainResult:
    """The result of a training run.

    Attributes:
        run_dir: the run's directory; `agentfly.core.run_directory.RunDirectory` reads it.
        steps: number of finished steps, including those before a resume.
        metrics: metrics of the steps of this call, by step.
        evaluations: metrics of the evaluations of this call, by the number of finished steps.
        checkpoint: the last checkpoint, a Hugging Face directory.
        best_checkpoint: the checkpoint of the best evaluation, with ``keep_best``; None if there is none.
        stopped_early: why the run ended before its last step; empty if it did not.
    """

    run_dir: Path
    steps: int
    metrics: dict[int, dict[str, float]]
    evaluations: dict[int, dict[str, float]]
    checkpoint: Path
    best_checkpoint: Path | None = None
    stopped_early: str = ""

    def __repr__(self) -> str:
        """One line, without the metrics of all steps."""
        parts = [f"{self.steps} steps"]
        for prefix, metrics in (("", self.metrics), ("eval ", self.evaluations)):
            rewards = [metrics[step]["reward/mean"] for step in sorted(metrics) if "reward/mean" in metrics[step]]
            if rewards:
                parts.append(f"{prefix}reward/mean {rewards[0]:.4g} → {rewards[-1]:.4g}")
        parts += [f"stopped early: {self.stopped_early}"] if self.stopped_early else []
        return f"TrainResult({', '.join(parts)}, checkpoint={str(self.checkpoint)!r})"


@dataclass(frozen=True)
class _RunComponents:
    """The objects that the steps of a run use."""

    policy: TrainablePolicy
    learner: Learner
    runner: Runner
    batches: BatchSource
    updater: PolicyUpdater
    evaluator: Evaluator
    busy_timer: RolloutBusyTimer
    replayed_metrics: Mapping[int, dict[str, float]]
    """Metrics that an interrupted run recorded for steps after its last checkpoint, which are repeated."""


class Trainer:
    """Trains an agent's policy on tasks.

    Each step runs ``attempts`` rollouts of ``tasks_per_step`` tasks, computes rows and advantages from their
    trajectories, and updates the policy's weights. With ``max_staleness=0`` rollouts and updates alternate, so that
    every token is trained under the weights that sampled it. Otherwise the rollouts of later steps run during updates,
    ahead of the weights by at most ``max_staleness`` versions. Tasks are trained in the order in which their rollouts
    started, so that slow rollouts are not starved.

    The caller keeps ownership of a given policy or engine. Missing ones are created and closed by the run. A policy
    that is not in use is entered and exited by the run. After any interruption, the same call with ``resume=True``
    resumes from the last checkpoint without repeating finished rollouts.

    Args:
        agent: the agent.
        tasks: the tasks to train on: `Task` objects, mappings with a ``prompt``, prompts, or the path of a file
            (`agentfly.core.task`).
        reward: scores the rollouts; by default the sum of the tools' rewards, 0 if there are none.
        run_dir: directory of the run's checkpoints, trajectories and metrics.
        eval_tasks: held-out tasks, evaluated before the first and after the last step, and in between as configured.
        config: the settings.
        curriculum: chooses and orders the tasks of each epoch; by default all of them in random order.
        events: receives the run's events.
        policy: the policy to train, with its weights before the first step; by default loaded from ``agent.model``.
            With a `VLLMPolicy`, the model learns in this process and the servers sample with its weights.
        engine: schedules the resources; created if not given.
        subagent_policies: policies of subagents with another model, by model; loaded if not given.
        resume: resume from the last checkpoint in ``run_dir``, or start if there is none.

    Raises:
        ConfigError: the settings, the agent, the policy and the directory are inconsistent.
        UsageError: ``agent`` is not an `Agent`, ``reward`` is not a reward, ``curriculum`` is not a `Curriculum`, or
            a required field is missing from a task.
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
        curriculum: Curriculum | None = None,
        events: EventStream | None = None,
        policy: Policy | None = None,
        engine: ResourceEngine | None = None,
        subagent_policies: Mapping[str, Policy | ChatPolicy] = NO_POLICIES,
        resume: bool = False,
    ) -> None:
        require_agent(agent)
        require_engine(engine)
        require_events(events)
        require_policies(policy, subagent_policies)
        self._agent = agent
        self._reward = tool_rewards if reward is None else reward
        require_reward(self._reward)
        self._config = config or TrainConfig()
        rows = to_tasks(tasks)
        self._order = make_task_order(rows, self._config.seed, curriculum)
        self._curriculum = fingerprint_value(curriculum)
        self._eval_tasks = to_tasks(eval_tasks) if eval_tasks is not None else []
        require_fields(agent, [*rows, *self._eval_tasks], self._reward)
        if warning := shared_tasks(rows, self._eval_tasks):
            logger.warning("%s", warning)
        self._run = RunDirectory(run_dir)
        self._events = events or EventStream()
        self._given_policy = policy
        self._engine = engine
        self._subagent_policies = subagent_policies
        self._checkpoints = Checkpoints(self._run.checkpoints, keep=self._config.keep_checkpoints)
        self._journal = Journal(self._run.journal)
        self._temperature = training_temperature(agent, self._config)
        self._greedy = self._config.chosen_algorithm.needs_greedy
        require_reward_source(agent, self._reward, greedy=self._greedy)
        require_evaluations(self._config, self._eval_tasks)
        self._trackers = {name: TRACKERS[name]() for name in self._config.trackers}
        self._resume = resume
        self._ran = False
        if not resume:
            self._run.require_unused()

    async def run(self) -> TrainResult:
        """Train. Cancellation stops the run cleanly; the last checkpoint remains valid.

        Raises:
            FailureBudgetExceeded: too many rollouts failed because of infrastructure.
            UsageError: no rollout of a step can be trained on, or this method has run before.
            AgentFlyError: something is missing or invalid before the first rollout starts.
        """
        if self._ran:
            raise UsageError("This Trainer has run. To continue its run, create another one with resume=True.")
        self._ran = True
        started = time.perf_counter()
        config, events = self._config, self._events
        async with AsyncExitStack() as owned:
            policy = await open_trainable_policy(self._given_policy, self._agent.model, config, events, owned)
            self._run.ensure()
            await owned.enter_async_context(self._journal.opened())
            learner, state = await self._restore_or_start(policy)
            components = await self._open_components(policy, learner, state, owned)
            await owned.enter_async_context(self._track())
            owned.enter_context(tuned_gc())
            events.emit(
                TrainingStarted(
                    run_dir=str(self._run.path),
                    steps=config.steps,
                    start_step=state.step,
                    model=str(self._agent.model),
                    dtype=dtype_of(policy.model),
                    device=str(policy.model.device),
                    further=how_to_go_further(
                        "training.steps",
                        f"the schedule {config.schedule} has ended" if depends_on_steps(config.schedule) else "",
                        self._run,
                    ),
                )
            )
            metrics: dict[int, dict[str, float]] = {}
            evaluations: dict[int, dict[str, float]] = {}
            if state.step == 0 and state.evaluations.best is None and self._eval_tasks:
                state, evaluations[0] = await self._evaluate(components, state)
                if self._stop_reason(state):
                    await self._save(components, state)
            while state.step < config.steps and not self._stop_reason(state):
                state, metrics[state.step] = await self._step(components, state)
                if self._is_due(state.step, config.eval_every_steps) and self._eval_tasks:
                    state, evaluations[state.step] = await self._evaluate(components, state)
                if self._is_checkpoint(state):
                    await self._save(components, state)
            stopped_early = self._stop_reason(state) if state.step < config.steps else ""
            events.emit(TrainingFinished(step=state.step, seconds=time.perf_counter() - started, reason=stopped_early))
        checkpoint = self._checkpoints.current
        assert checkpoint is not None
        return TrainResult(
            self._run.path,
            state.step,
            metrics,
            evaluations,
            checkpoint,
            self._checkpoints.best(),
            stopped_early,
        )

    # --- before the first step ----------------------------------------------------------------------------------------

    async def _restore_or_start(self, policy: TrainablePolicy) -> tuple[Learner, TrainerState]:
        """Return the learner and the state to start from, those of the last checkpoint if the run is resumed."""
        state = TrainerState(
            step=0,
            cursor=0,
            version=policy.version,
            model=str(self._agent.model),
            tasks=self._order.fingerprint,
            agent=agent_fingerprint(self._agent),
            reward=self._reward.name,
            config=self._config.model_dump(mode="json") | {"temperature": self._temperature},
            curriculum=self._curriculum,
        )
        async with policy.exclusive_access():
            learner, resumed = await run_in_thread_to_completion(partial(self._restored, policy.model, state))
            if resumed is not None:
                policy.weights_updated(resumed.version)
        return learner, resumed or state

    def _restored(self, model: PreTrainedModel, state: TrainerState) -> tuple[Learner, TrainerState | None]:
        """Load the last checkpoint and return the learner with the trainer state; None without a checkpoint."""
        self._checkpoints.remove_partial()
        latest = self._checkpoints.latest_valid()
        saved = read_trainer_state(latest) if latest else None
        if saved is not None:
            require_same_run(saved, state)
        elif not (self._resume and can_resume(self._run, self._journal.read_manifest(), state)):
            self._journal.clear()
            remove_after(self._run, None)
        remove_after(self._run, last_saved_step(self._run, saved.step if saved else 0))
        needs_critic = self._config.chosen_algorithm.needs_critic
        learner = Learner(model, self._config, temperature=self._temperature, needs_critic=needs_critic)
        if latest is None or saved is None:
            return learner, None
        load_weights(model, latest)
        restore_learner(learner, latest)
        self._order.load_state(saved.order)
        evaluations = resumed_evaluations(saved, state)
        self._checkpoints.mark_best(evaluations.best_step if self._config.keep_best else None)
        return learner, replace(saved, config=state.config, evaluations=evaluations)

    async def _open_components(
        self, policy: TrainablePolicy, learner: Learner, state: TrainerState, owned: AsyncExitStack
    ) -> _RunComponents:
        runner = await owned.enter_async_context(self._runner(policy))
        if self._checkpoints.current is None:
            await run_in_thread_to_completion(partial(self._journal.write_manifest, asdict(state)))
        batches = BatchSource(
            self._run,
            self._order,
            runner,
            self._journal,
            self._config,
            temperature=self._temperature,
            greedy=self._greedy,
            on_file=last_saved_step(self._run, state.step),
        )
        busy_timer = RolloutBusyTimer(TRAIN)
        owned.enter_context(self._events.subscribed(busy_timer))
        return _RunComponents(
            policy,
            learner,
            runner,
            await owned.enter_async_context(batches),
            PolicyUpdater(policy, learner, self._config),
            Evaluator(self._run, self._eval_tasks, self._config, self._events),
            busy_timer,
            {row.step: row.values for row in self._run.metrics() if row.step > state.step},
        )

    def _track(self) -> AbstractAsyncContextManager[None]:
        about = {"model": str(self._agent.model), "reward": self._reward.name, **self._config.model_dump(mode="json")}
        return track_run(self._trackers, self._run, self._events, project=self._config.project, config=about)

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
            max_concurrent_starts=self._config.max_concurrent_starts,
            max_failure_rate=self._config.max_failure_rate,
        )

    # --- a step -------------------------------------------------------------------------------------------------------

    async def _step(self, components: _RunComponents, state: TrainerState) -> tuple[TrainerState, dict[str, float]]:
        started = time.perf_counter()
        step = state.step + 1
        before, began = components.runner.occupancy(), components.runner.concurrency()
        step_batch = await components.batches.next_batch(step, state.cursor)
        resources = occupancy_metrics(before, components.runner.occupancy())
        resources |= (components.runner.concurrency() - began).metrics()
        collected, running = time.perf_counter(), components.busy_timer.seconds
        batch = components.updater.make_batch(step_batch)
        learned = await components.updater.update(step_batch, batch)
        ended = time.perf_counter()
        self._order.record_results(step_batch.trajectories)
        state = replace(state, step=step, cursor=state.cursor + len(step_batch.groups))
        if step in components.replayed_metrics:
            self._events.emit(Progress(what=f"step {step} trained again, from the rollouts on file"))
            return state, components.replayed_metrics[step]
        trained = {row.rollout_id for row in batch.rows}
        seconds = {
            DISPATCHED: durations(components.batches.pop_finished()),
            TRAINED: durations(one for one in step_batch.trained_trajectories if one.rollout_id in trained),
        }
        metrics = (
            summarize(step_batch.trajectories)
            | resources
            | (step_batch.metrics if self._config.dynamic_sampling else {})
            | learned
            | self._order.metrics(state.cursor)
            | duration_metrics(seconds)
            | {
                "time/rollout_s": collected - started,
                "time/update_s": ended - collected,
                "time/step_s": ended - started,
                "time/overlap_fraction": min(1.0, (components.busy_timer.seconds - running) / (ended - collected)),
            }
        )
        self._events.emit(StepFinished(step=step, metrics=metrics, histograms=seconds))
        return state, metrics

    # --- between the steps --------------------------------------------------------------------------------------------

    async def _evaluate(self, components: _RunComponents, state: TrainerState) -> tuple[TrainerState, dict[str, float]]:
        metrics = await components.evaluator.evaluate(components.runner, state.step)
        if self._config.early_stop is None and not self._config.keep_best:
            return state, metrics
        return replace(
            state, evaluations=state.evaluations.with_evaluation(state.step, metrics, self._config.eval_metric)
        ), metrics

    def _stop_reason(self, state: TrainerState) -> str:
        """Return why the run should stop before its last step, or an empty string."""
        return state.evaluations.stop_reason(self._config.early_stop, self._config.eval_metric)

    async def _save(self, components: _RunComponents, state: TrainerState) -> None:
        policy, learner = components.policy, components.learner

        def write(path: Path) -> None:
            write_model(path, policy.model, policy.tokenizer.hf)
            saved = replace(state, version=policy.version, order=self._order.state(state.cursor))
            write_trainer_state(path, saved, learner.state())

        best = state.evaluations.best_step if self._config.keep_best else 0
        path = await run_in_thread_to_completion(partial(self._checkpoints.save, state.step, write, best=best))
        await run_in_thread_to_completion(self._journal.remove_manifest)
        self._events.emit(CheckpointSaved(step=state.step, path=str(path)))

    def _is_checkpoint(self, state: TrainerState) -> bool:
        """Return whether to save a checkpoint: as configured, at the end of the run, or for a new best step."""
        best = self._config.keep_best and state.evaluations.best_step == state.step
        return best or bool(self._stop_reason(state)) or self._is_due(state.step, self._config.checkpoint_every_steps)

    def _is_due(self, step: int, every: int | None) -> bool:
        return step == self._config.steps or (every is not None and step % every == 0)
