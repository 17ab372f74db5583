"""train and train_async: train an agent from synchronous or asynchronous code."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agentfly.agents.agent import Agent
from agentfly.agents.group_reward import AnyReward
from agentfly.core import signals
from agentfly.core.errors import ConfigError, UsageError, type_of
from agentfly.core.events import EventStream
from agentfly.core.run_directory import RunDirectory
from agentfly.core.task import Tasks
from agentfly.policies.policy import ChatPolicy, Policy
from agentfly.resources.engine.engine import ResourceEngine
from agentfly.rollouts.agent_runtime import NO_POLICIES
from agentfly.rollouts.runner import require_events
from agentfly.training.config.train_config import TrainConfig
from agentfly.training.curriculum import Curriculum
from agentfly.training.trainer import Trainer, TrainResult
from agentfly.viewing.event_log import record_events
from agentfly.viewing.progress import ConsoleProgress


def train(
    agent: Agent,
    tasks: Tasks,
    reward: AnyReward | None = None,
    *,
    config: TrainConfig | None = None,
    eval_tasks: Tasks | None = None,
    run_dir: Path | str | None = None,
    curriculum: Curriculum | None = None,
    resume: bool = False,
    progress: bool = True,
    events: EventStream | None = None,
    policy: Policy | None = None,
    engine: ResourceEngine | None = None,
    subagent_policies: Mapping[str, Policy | ChatPolicy] = NO_POLICIES,
    **settings: Any,
) -> TrainResult:
    """Train an agent's policy on tasks, and save metrics, trajectories and checkpoints in a run directory.

    Blocks until the run ends. Ctrl-C and SIGTERM stop it cleanly: all resources are released, and the run can be
    resumed from its last checkpoint with ``resume=True``. `Trainer` describes the other arguments.

    Args:
        config: the training settings; the defaults of `TrainConfig` if not given.
        run_dir: the run's directory; by default a new one under ``runs``, named after the time.
        progress: whether to show progress on standard error: live on a terminal, otherwise one line per step.
        settings: fields of `TrainConfig` that override ``config``, such as ``algorithm``, ``steps`` and
            ``learning_rate``.

    Raises:
        ConfigError: a setting is unknown or contradicts another.
        UsageError: ``agent`` is not an `Agent`, or an event loop is running; await `train_async` there.
    """
    _require_no_loop()
    return signals.run_until_signal(
        train_async(
            agent,
            tasks,
            reward,
            config=config,
            eval_tasks=eval_tasks,
            run_dir=run_dir,
            curriculum=curriculum,
            resume=resume,
            progress=progress,
            events=events,
            policy=policy,
            engine=engine,
            subagent_policies=subagent_policies,
            **settings,
        )
    )


async def train_async(
    agent: Agent,
    tasks: Tasks,
    reward: AnyReward | None = None,
    *,
    config: TrainConfig | None = None,
    eval_tasks: Tasks | None = None,
    run_dir: Path | str | None = None,
    curriculum: Curriculum | None = None,
    resume: bool = False,
    progress: bool = True,
    events: EventStream | None = None,
    policy: Policy | None = None,
    engine: ResourceEngine | None = None,
    subagent_policies: Mapping[str, Policy | ChatPolicy] = NO_POLICIES,
    **settings: Any,
) -> TrainResult:
    """Train an agent's policy from code in an event loop, such as a notebook.

    Arguments, files and errors are the same as for `train`. Cancellation stops the run cleanly.
    """
    effective_config = _merge_settings(config, settings)
    if resume and run_dir is None:
        raise ConfigError("resume=True needs run_dir, the directory of the run to continue.")
    if run_dir is not None and not isinstance(run_dir, Path | str):
        raise ConfigError(f"run_dir={run_dir!r:.100}: it must be the path of a directory.")
    require_events(events)
    events = events or EventStream()
    with ExitStack() as stack:
        run = RunDirectory(run_dir) if run_dir is not None else RunDirectory.create()
        stack.callback(run.remove_unless_begun)
        trainer = Trainer(
            agent,
            tasks,
            reward,
            run_dir=run.path,
            eval_tasks=eval_tasks,
            config=effective_config,
            curriculum=curriculum,
            events=events,
            policy=policy,
            engine=engine,
            subagent_policies=subagent_policies,
            resume=resume,
        )
        stack.enter_context(record_events(run, events))
        if progress:
            stack.enter_context(events.subscribed(stack.enter_context(ConsoleProgress())))
        return await trainer.run()


def _merge_settings(config: TrainConfig | None, settings: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with some settings replaced."""
    TrainConfig.refuse_misspelled(train, settings)
    if config is None:
        return TrainConfig(**settings)
    if not isinstance(config, TrainConfig):
        raise ConfigError(f"config is {type_of(config)}; it must be a TrainConfig.")
    if not settings:
        return config
    return config.replaced(settings)


def _require_no_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(
        "train() blocks until the run ends and cannot be called inside an event loop, as in a notebook or an async "
        "function. Use `await af.train_async(…)` there, with the same arguments."
    )
