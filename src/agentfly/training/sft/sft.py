"""sft: runs a supervised warm start from synchronous code."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agentfly.agents.agent import Agent
from agentfly.core.errors import ConfigError
from agentfly.core.events import EventStream, Progress
from agentfly.core.gc_tuning import tuned_gc
from agentfly.core.run_directory import RunDirectory
from agentfly.policies.load import load_policy
from agentfly.rollouts.runner import require_agent
from agentfly.training.sft.config import SFTConfig
from agentfly.training.sft.dataset import Data, SFTDataset, build_dataset, load_data
from agentfly.training.sft.trainer import SFTResult, SFTTrainer
from agentfly.viewing.event_log import record_events
from agentfly.viewing.progress import ConsoleProgress


def sft(
    agent: Agent,
    data: Data,
    *,
    run_dir: Path | str | None = None,
    resume: bool = False,
    progress: bool = True,
    events: EventStream | None = None,
    **settings: Any,
) -> SFTResult:
    """Fine-tune an agent's model on successful trajectories.

    The model's own trajectories are learned with their sampled ids. Trajectories of an oracle or another model are
    rendered in the chat format of the agent's model. The loss covers exactly the agent's own turns. Blocks until the
    run ends; Ctrl-C stops it, and ``resume=True`` resumes it.

    Args:
        agent: the agent, whose model is trained.
        data: trajectories, or paths of run directories and trajectory files.
        run_dir: the run's directory; by default a new one under ``runs``, named after the time.
        resume: resume from the last checkpoint in ``run_dir``.
        progress: whether to show progress on standard error.
        events: receives the run's events.
        settings: the fields of `SFTConfig`, such as ``min_reward``, ``epochs`` and ``learning_rate``.

    Raises:
        ConfigError: a setting is unknown, there is no training data, or the run cannot be resumed.
        PrerequisiteError: the model is not available.
    """
    SFTConfig.refuse_misspelled(sft, settings)
    config = SFTConfig(**settings)
    require_agent(agent)
    if resume and run_dir is None:
        raise ConfigError("resume=True needs run_dir, the directory of the run to continue.")
    events = events or EventStream()
    with ExitStack() as stack:
        run = RunDirectory(run_dir) if run_dir is not None else RunDirectory.create()
        stack.callback(run.remove_unless_begun)
        if not resume:
            run.require_unused()
        trajectories = load_data(data)
        if progress:
            stack.enter_context(events.subscribed(stack.enter_context(ConsoleProgress())))
        events.emit(Progress(what=f"loading {agent.model}"))
        policy = load_policy(agent.model, **config.policy_settings)
        examples = build_dataset(trajectories, agent, policy.tokenizer, config, max_tokens=policy.context_length)
        events.emit(Progress(what=_dataset_summary(examples)))
        trainer = SFTTrainer(policy, str(agent.model), examples, config, run, events=events, resume=resume)
        stack.enter_context(record_events(run, events))
        stack.enter_context(tuned_gc())
        return trainer.run()


def _dataset_summary(examples: SFTDataset) -> str:
    """Return the numbers of rows, and of excluded trajectories by cause, as one line."""
    summary = f"{len(examples.rows)} training rows, {len(examples.held_out)} held out"
    excluded = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in sorted(examples.excluded.items()))
    return f"{summary}; left out: {excluded}" if excluded else summary
