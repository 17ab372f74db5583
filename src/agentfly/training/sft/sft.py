"""sft: the one call of a supervised warm start, from code without an event loop."""

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
    """Teach an agent's model to say what was said in trajectories that won.

    The trajectories may be the model's own, whose sampled ids are learned as they are, or those of an oracle or of any
    other model, whose conversations are rendered in the chat format of the agent's model. The loss is exactly on the
    agent's own turns. Blocks until the run has ended; Ctrl-C stops it, and ``resume=True`` goes on with it.

    Args:
        agent: the agent; its model is the one that learns.
        data: trajectories, or directories of runs and files of trajectories.
        run_dir: the run's directory; one named after the time, under ``runs``, if not given.
        resume: go on from the last checkpoint in ``run_dir``.
        progress: whether to show the run's progress on standard error.
        events: where events go.
        settings: the fields of `SFTConfig`: ``min_reward``, ``epochs``, ``learning_rate``, …

    Raises:
        ConfigError: a setting is unknown, there is nothing to learn from, or the run cannot be gone on with.
        PrerequisiteError: the model cannot be had.
    """
    SFTConfig.refuse_misspelled(sft, settings)
    config = SFTConfig(**settings)
    require_agent(agent)
    if resume and run_dir is None:
        raise ConfigError("resume=True needs run_dir, the directory of the run to go on with.")
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
    """What is learned from, in a line."""
    told = f"{len(examples.rows)} rows to learn, {len(examples.held_out)} held out"
    left_out = ", ".join(f"{count} {cause.replace('_', ' ')}" for cause, count in sorted(examples.excluded.items()))
    return f"{told}; left out: {left_out}" if left_out else told
