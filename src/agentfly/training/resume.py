"""Resuming: whether a run directory can be gone on with, and the removal of what will be done again."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from agentfly.agents.agent import Agent
from agentfly.errors import ConfigError
from agentfly.run_directory import RunDirectory, read_json_lines
from agentfly.training.checkpoints import Place

FREE_TO_CHANGE = frozenset(
    {
        "steps",
        "micro_batch_tokens",
        "eval_every_steps",
        "eval_attempts",
        "eval_temperature",
        "checkpoint_every_steps",
        "keep_checkpoints",
        "max_concurrent_generations",
        "max_concurrent_rollouts",
        "max_failure_share",
        "threads",
    }
)
"""Settings that may differ when a run is resumed: they do not change what is learned from a batch."""


_FINGERPRINT = "sha256:"

_LIMITS = (
    "max_turns",
    "max_tokens_per_turn",
    "max_sequence_tokens",
    "max_sampled_tokens",
    "max_tool_calls",
    "max_wall_seconds",
    "max_consecutive_invalid_calls",
)


def agent_traits(agent: Agent) -> dict[str, Any]:
    """What of an agent shapes its rollouts, besides model and sampling: words and tools as fingerprints, and limits."""
    tools = {f"tool {tool.name}": _fingerprint(tool.definition) for tool in agent.tools}
    limits = {name: getattr(agent, name) for name in _LIMITS}
    return {
        "system message": _fingerprint(agent.system_message()),
        "tool-call format": agent.format.name,
        **tools,
        **limits,
    }


def require_same_run(saved: Place, now: Place) -> None:
    """Raise unless a run with the settings of ``now`` can go on from ``saved``.

    Raises:
        ConfigError: settings that shape the learning differ; the message names each with both values.
    """
    differences = [
        _difference(name, saved.config.get(name), value)
        for name, value in now.config.items()
        if name not in FREE_TO_CHANGE and saved.config.get(name) != value
    ]
    differences += [
        _difference(f"the agent's {name}", saved.agent.get(name), now.agent.get(name))
        for name in {**saved.agent, **now.agent}
        if saved.agent.get(name) != now.agent.get(name)
    ]
    if saved.model != now.model:
        differences.append(_difference("the model", saved.model, now.model))
    if saved.reward != now.reward:
        differences.append(_difference("the reward", saved.reward, now.reward))
    if saved.tasks != now.tasks:
        differences.append("the tasks, or their order in the data set, are others")
    if differences:
        raise ConfigError(
            f"The run cannot be resumed with other settings than it was begun with: {'; '.join(differences)}. "
            "Put them back, or begin a new run from the checkpoint's model."
        )


def _difference(name: str, before: Any, now: Any) -> str:
    if any(isinstance(value, str) and value.startswith(_FINGERPRINT) for value in (before, now)):
        return f"{name} is {'new' if before is None else 'missing' if now is None else 'another'}"
    return f"{name} was {before!r} and is now {now!r}"


def _fingerprint(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return _FINGERPRINT + hashlib.sha256(text.encode()).hexdigest()[:16]


def forget_after(run: RunDirectory, step: int | None) -> None:
    """Remove metrics and trajectories of the steps after ``step``, which will be done again; None removes all."""
    last = -1 if step is None else step
    for kind in ("train", "eval"):
        for number, path in run.trajectory_files(kind):
            if number > last:
                path.unlink()
    if run.metrics_file.exists():
        _replace_lines(run, [line for line in read_json_lines(run.metrics_file) if line["step"] <= last])


def _replace_lines(run: RunDirectory, lines: list[dict[str, Any]]) -> None:
    kept = run.metrics_file.with_suffix(".kept")
    kept.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    kept.replace(run.metrics_file)
